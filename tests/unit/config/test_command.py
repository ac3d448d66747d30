"""A stage that is a command: what its section takes, and what a placeholder becomes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.config import CommandStage, Config, load_config, parse_config
from shakedown.config.command import PLACEHOLDERS, environment_of, words_of
from shakedown.core.errors import ConfigError, UsageError
from shakedown.training.lint import findings_of

EXAMPLES = Path(__file__).parents[3] / "config" / "examples"
STAGE: dict[str, Any] = {"algorithm": "command", "launch": "torchrun", "command": "train.py"}


def run_of(**changes: Any) -> Config:
    return parse_config({"run": "r", "stages": {"lab": {**STAGE, **changes}}})


def stage_of(**changes: Any) -> CommandStage:
    return run_of(**changes).command_stages["lab"]


def test_a_run_of_commands_needs_no_model_data_or_agents() -> None:
    config = run_of()

    assert (config.own_stages, list(config.command_stages)) == ({}, ["lab"])
    assert findings_of(config) == []


def test_a_command_that_asks_for_the_run_s_model_makes_it_required() -> None:
    with pytest.raises(ConfigError, match="model: missing"):
        run_of(command="train.py {model}")
    with pytest.raises(ConfigError, match="data: missing"):
        run_of(command="train.py {data}")


def test_a_command_stands_beside_stages_of_our_own(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"stages": {"lab": STAGE}, "order": ["sft", "lab"]}))

    config = load_config(EXAMPLES.parent / "config.yaml", overlay)

    assert (list(config.own_stages), list(config.command_stages)) == (["sft"], ["lab"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"command": "train.py {resum}"}, "unknown placeholder {resum} (did you mean 'resume'?)"),
        ({"command": "train.py 'x"}, "cannot be cut into words"),
        ({"resume": {"glob": "x", "arguments": "-x 'a {stage}'"}}, "{stage} inside a text"),
        ({"command": "train.py {resume}"}, "{resume} needs `resume: {glob: ...}`"),
        ({"outputs": ["out/{port}"]}, "{port} is another one in each attempt"),
        ({"resume": {"glob": "{hosts}/*"}}, "{hosts} is another one in each attempt"),
        ({"resume": {"globb": "a"}}, "lab.resume.globb: unknown key (did you mean 'glob'?)"),
        ({"progress": {"pattern": "step (\\d+)"}}, "has no group of the name step"),
        ({"progress": {"pattern": "("}}, "not a regular expression"),
        ({"progress": {}}, "expected one of `pattern`, `file` and `tensorboard`"),
        ({"launch": "mpirun"}, "Input should be 'torchrun'"),
        ({"ranks_per_nod": 2}, "unknown key (did you mean 'ranks_per_node'?)"),
        ({"algorithm": "comand"}, "expected sft, grpo or command, got 'comand'"),
    ],
)
def test_a_section_that_is_wrong_says_where_and_what_is_valid(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        run_of(**changes)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "command",
    [
        "bash -c 'echo {run}'",
        "bash -euo pipefail -c 'echo {run}'",
        "fish -c 'echo {run}'",
        "/bin/busybox sh -c 'echo {run}'",
        "ssh n1 'train.py {run}'",
        "sbatch --wrap='x {run}'",
        "env -S 'bash -c {run}'",
        "python -c 'print(\"{run}\")'",
        "bash -c cd${{IFS}}{run}",
        "bash -c {run};id",
        "python -c print({run})",
    ],
)
def test_a_placeholder_inside_a_text_is_refused_whoever_reads_it(command: str) -> None:
    with pytest.raises(ConfigError, match=r'\{run\} inside a text.*write "\$SHAKEDOWN_RUN"'):
        run_of(command=command)


def test_a_value_never_becomes_two_words_nor_a_placeholder() -> None:
    given = "/a b/ü,c=1"
    values = dict.fromkeys(PLACEHOLDERS, given)

    words = words_of("train.py --resume {resume} --out={stage}/x +a.b={data},{run}", values)

    assert words == [
        "train.py",
        "--resume",
        given,
        f"--out={given}/x",
        f"+a.b={given},{given}",
    ]


@pytest.mark.parametrize("value", ["/s_$(id)", "/s_`id`", "/s;id", "/s\nid", "/a'b", "{model}"])
def test_a_value_that_a_shell_would_read_is_no_word_but_a_variable(value: str) -> None:
    values = {"resume": value, "stage": "/plain"}

    with pytest.raises(UsageError, match=r"would read (?s:.)*SHAKEDOWN_RESUME") as raised:
        words_of("bash -c 'eval $0' {resume}", values)

    assert repr(value) in str(raised.value)
    assert words_of("train.sh {stage}", values) == ["train.sh", "/plain"]
    assert environment_of(values)["SHAKEDOWN_RESUME"] == value


def test_an_empty_value_stays_a_word_and_other_braces_stay_as_they_are() -> None:
    assert words_of("t {resume} end", {"resume": ""}) == ["t", "", "end"]
    kept = '${oc.env:HOME} ${stage} {"a":1} {{stage}}'
    assert words_of(f"'{kept}'", {}) == ['${oc.env:HOME} ${stage} {"a":1} {stage}']


def test_progress_none_is_the_same_as_no_progress() -> None:
    assert stage_of(progress="none").progress is None
    assert stage_of().progress is None


def test_a_command_that_uses_the_server_stands_before_grpo() -> None:
    demo = load_config(EXAMPLES.parent / "config.yaml").model_dump(mode="json")
    demo["stages"]["lab"] = {**STAGE, "command": "train.py {server_url}"}

    after = findings_of(parse_config({**demo, "order": ["grpo", "lab"]}))
    before = findings_of(parse_config({**demo, "order": ["lab", "grpo"]}))

    assert [f.subject for f in after if f.status == "fail"] == ["stages.lab.command"]
    assert not [f for f in before if f.status == "fail"]


def test_more_ranks_than_gpus_are_advised_against_and_too_many_nodes_refused() -> None:
    body = {"run": "r", "cluster": {"nodes": 1, "gpus_per_node": 2}}
    crowded = parse_config({**body, "stages": {"lab": {**STAGE, "ranks_per_node": 3}}})
    wide = parse_config({**body, "stages": {"lab": {**STAGE, "nodes": 2, "ranks_per_node": 2}}})

    assert [(f.subject, f.status) for f in findings_of(crowded)] == [
        ("stages.lab.ranks_per_node", "warn")
    ]
    assert [(f.subject, f.status) for f in findings_of(wide)] == [("stages.lab.nodes", "fail")]


@pytest.mark.parametrize("name", ["verl", "nemo-rl", "areal", "prime-rl", "trl"])
def test_an_example_of_a_project_is_sound(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")

    assert findings_of(config) == []
    assert all(stage.progress for stage in config.command_stages.values())
