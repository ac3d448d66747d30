"""The config is strict, and its errors name the key and the nearest valid one."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.cli import main
from shakedown.config import (
    KeyLocations,
    ServeConfig,
    dump_config,
    load_config,
    merge,
    parse_config,
)
from shakedown.core.errors import ConfigError, ExitCode
from shakedown.training.lint import faults_of, findings_of

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "config" / "config.yaml"
EXAMPLES = sorted((ROOT / "config" / "examples").glob("*.yaml"))
# The others are whole runs: they lie over nothing.
OVERLAYS = [path for path in EXAMPLES if "algorithm: command" not in path.read_text()]


def _shipped() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    return body


def test_shipped_config_states_every_key_of_the_schema() -> None:
    config = load_config(SHIPPED)
    written = _shipped()

    resolved = config.model_dump(mode="json")

    assert resolved.keys() == written.keys()
    for section, value in resolved.items():
        if isinstance(value, dict):
            assert value.keys() == written[section].keys(), section
    for name, stage in resolved["stages"].items():
        assert stage.keys() == written["stages"][name].keys()
    assert resolved["stages"]["grpo"]["grpo"].keys() == written["stages"]["grpo"]["grpo"].keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_every_example_loads_over_the_shipped_config(example: Path) -> None:
    assert load_config(SHIPPED, example).stages


@pytest.mark.parametrize("example", OVERLAYS, ids=lambda p: p.name)
def test_an_overlay_alone_lies_over_the_workflows_config(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    assert load_config(example) == load_config(SHIPPED, example)


def test_an_overlay_without_stages_gets_those_of_the_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("run: mine\n", encoding="utf-8")
    monkeypatch.chdir(ROOT)

    assert list(load_config(overlay).stages) == ["sft", "grpo"]


def test_a_whole_config_alone_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = _shipped()
    body["stages"] = {"only": body["stages"]["sft"]}
    whole = tmp_path / "whole.yaml"
    whole.write_text(yaml.safe_dump(body | {"order": ["only"]}), encoding="utf-8")
    monkeypatch.chdir(ROOT)

    assert list(load_config(whole).stages) == ["only"]


def test_a_fault_of_an_overlay_names_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("serve: {enigne: vllm}\n", encoding="utf-8")
    monkeypatch.chdir(ROOT)

    with pytest.raises(ConfigError) as caught:
        load_config(overlay)

    assert f"config/config.yaml + {overlay}: 1 fault(s)" in str(caught.value)
    assert "did you mean 'engine'?" in str(caught.value)


PLACES = """\
seed: 7
stages:
  sft:
    optimizer: &shared
      {given}
  grpo: {{optimizer: *shared}}
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("lr: 2e-3", "lr: Input should be a valid number, got '2e-3'; YAML reads it as text: write "
         "2.0e-3"),
        ("lr: 1E4", "write 1.0e+4"),
        ("l_r: 1.0", "stages.sft.optimizer.l_r: unknown key (did you mean 'lr'?)"),
        ("lr: fast", "got 'fast'\n"),
    ],
)  # fmt: skip
def test_a_fault_says_where_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, told: str
) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(PLACES.format(given=given), encoding="utf-8")
    monkeypatch.chdir(ROOT)

    with pytest.raises(ConfigError) as caught:
        load_config(overlay)

    assert told in f"{caught.value}\n"
    assert f"{overlay}:5:7: " in str(caught.value)


@pytest.mark.parametrize(("given", "hint"), [("debug: off", True), ("steps: off", False)])
def test_off_where_a_word_was_meant_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, hint: bool
) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"stages:\n  sft:\n    {given}\n", encoding="utf-8")
    monkeypatch.chdir(ROOT)

    with pytest.raises(ConfigError) as caught:
        load_config(overlay)

    assert ("put it in quotes" in str(caught.value)) == hint
    assert f"{overlay}:3:5: " in str(caught.value)


@pytest.mark.parametrize("given", ["steps: 1e3", "allocation: 1e3"])
def test_a_number_is_not_advised_where_it_would_be_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(f"stages:\n  sft:\n    {given}\n", encoding="utf-8")
    monkeypatch.chdir(ROOT)

    code = main(["lint", str(overlay)])

    said = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert f"{overlay}:3:5" in said.out + said.err
    assert "1.0e+3" not in said.out + said.err


def test_the_last_file_that_writes_a_key_is_its_place(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.yaml", "b.yaml", "gone.yaml")]
    paths[0].write_text("run: a\nserve: {engine: vllm}\n", encoding="utf-8")
    paths[1].write_text("\nserve:\n  max_model_len: 9\n", encoding="utf-8")

    written = KeyLocations(paths)

    assert written.at("run") == f"{paths[0]}:1:1"
    assert written.at("serve.engine") == f"{paths[0]}:2:9"
    assert written.at("serve.max_model_len") == f"{paths[1]}:3:3"
    assert written.at("serve.lease") == f"{paths[1]}:2:1"
    assert written.at("seed") == ""


def test_aliases_without_end_have_places_within_bounds(tmp_path: Path) -> None:
    rows = ["a0: &a0 {x: 1, y: 2}"]
    rows += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    (tmp_path / "bomb.yaml").write_text("\n".join(rows), encoding="utf-8")

    assert KeyLocations([tmp_path / "bomb.yaml"]).at("a0") == f"{tmp_path / 'bomb.yaml'}:1:1"


def test_resolved_form_loads_to_the_same_config(tmp_path: Path) -> None:
    config = load_config(SHIPPED)
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")

    assert load_config(path) == config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sed": 1}, "sed: unknown key (did you mean 'seed'?)"),
        (
            {"consistency": {"limits": {"k33": 1e-3}}},
            "consistency.limits.k33: unknown key (did you mean 'k3'?)",
        ),
        ({"serve": {"enigne": "vllm"}}, "serve.enigne: unknown key (did you mean 'engine'?)"),
        (
            {"stages": {"sft": {"optimizer": {"l_r": 1.0}}}},
            "stages.sft.optimizer.l_r: unknown key (did you mean 'lr'?)",
        ),
        (
            {"agents": {"rollout_pd": 2}},
            "agents.rollout_pd: unknown key (did you mean 'rollout_dp'?)",
        ),
        ({"agents": {"rollout_dp": 3}}, "global_batch 256 cannot be cut into rollout_dp 3 equal"),
        (
            {"stages": {"sft": {"micro_batch_size": 2, "max_tokens_per_micro_batch": 9}}},
            "micro_batch_size 2 and max_tokens_per_micro_batch 9 both cut a rank's rows",
        ),
        ({"seed": "0"}, "seed: Input should be a valid integer, got '0'"),
        ({"stages": {"sft": {"steps": 0}}}, "stages.sft.steps: Input should be greater than 0"),
        ({"run": "../evil"}, "run: String should match pattern"),
        (
            {"stages": {"grpo": {"grpo": {"tis_cap": 0.5}}}},
            "tis_cap is 0 (no weights) or at least 1, got 0.5",
        ),
        ({"stages": {"grpo": {"grpo": {"kl_coef": -0.1}}}}, "greater than or equal to 0, got -0.1"),
        ({"stages": {"grpo": {"grpo": {"kl_coef": float("inf")}}}}, "should be a finite number"),
        (
            {"stages": {"grpo": {"grpo": {"loss_level": "tokens"}}}},
            "stages.grpo.grpo.loss_level: Input should be 'token', 'sequence' or 'constant'",
        ),
        ({"stages": {"sft": {"grpo": {}}}}, "if and only if its algorithm is grpo"),
    ],
)
def test_wrong_config_names_key_and_valid_ones(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(merge(_shipped(), change))

    assert expected in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("change", "size"),
    [({}, 64), ({"global_batch": 96}, 24), ({"rollout_dp": 3, "prompts": 5}, 5)],
)
def test_the_checks_take_the_share_of_one_replica_or_the_prompts_that_are_set(
    change: dict[str, Any], size: int
) -> None:
    assert parse_config(merge(_shipped(), {"agents": change})).agents.local_batch == size


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00"])
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)


def test_missing_file_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"cannot read config nowhere\.yaml"):
        load_config(Path("nowhere.yaml"))


def test_stages_follow_the_order_and_not_the_overlay() -> None:
    shipped = _shipped()
    swapped = {name: shipped["stages"][name] for name in ("grpo", "sft")}

    config = parse_config({**shipped, "stages": swapped})

    assert list(config.stages) == ["sft", "grpo"]


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        (["sft", "grp"], r"no stage by 'grp' \(did you mean 'grpo'\?\); stages: sft, grpo"),
        (["sft", "sft", "grpo"], "a stage twice: sft, sft, grpo"),
    ],
)
def test_an_order_of_other_stages_is_refused(order: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse_config({**_shipped(), "order": order})


@pytest.mark.parametrize("order", [["grpo"], ["sft"], ["grpo", "sft"]])
def test_the_stages_of_a_run_are_those_of_its_order(order: list[str]) -> None:
    config = parse_config({**_shipped(), "order": order})

    assert list(config.stages) == order
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_a_stage_that_is_null_is_refused_with_the_way_to_leave_it_out() -> None:
    with pytest.raises(ConfigError, match="name the others in `order`"):
        parse_config(merge(_shipped(), {"stages": {"sft": None}}))


def _linted(change: dict[str, Any]) -> dict[str, str]:
    findings = faults_of(findings_of(parse_config(merge(_shipped(), {"data": change}))))
    return {finding.subject: f"{finding.expected} {finding.remedy}" for finding in findings}


def test_own_reward_is_imported_by_lint_and_its_fault_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reward(a, b): return 1.0", encoding="utf-8")

    assert _linted({"reward": f"{tmp_path / 'own.py'}:reward"}) == {}
    assert (
        "no 'rewards' there (did you mean 'reward'?)"
        in (_linted({"reward": f"{tmp_path / 'own.py'}:rewards"})["data.reward"])
    )
    assert "did you mean 'gsm8k'" in _linted({"reward": "gsm8"})["data.reward"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"train": "gsm8k", "heldout": "geometry3k:test"}, {}),
        ({"train": "hub:my/copy", "heldout": "hub:my/copy:test", "format": "gsm8k"}, {}),
        ({"train": f"{ROOT}/tests/data/datasets/gsm8k.jsonl", "format": "gsm8k"}, {}),
        ({"train": "gsm9k"}, {"data.train": "did you mean 'gsm8k'"}),
        ({"train": "gsm8k=no.jsonl"}, {"data.train": "an existing JSON-lines or parquet file"}),
        ({"format": "gsm9k"}, {"data.format": "did you mean 'gsm8k'"}),
    ],
)
def test_data_that_is_not_there_is_found_by_lint(
    change: dict[str, Any], fault: dict[str, str]
) -> None:
    found = _linted(change)

    assert found.keys() == fault.keys()
    assert all(words in found[subject] for subject, words in fault.items())


def test_the_urls_of_several_external_servers_are_a_list_or_a_text_with_commas() -> None:
    urls = ["http://10.0.0.7:8000", "http://10.0.0.8:8000"]

    for given in (urls, ",".join(urls)):
        config = ServeConfig.model_validate({"engine": "external", "url": given})
        assert config.url == ",".join(urls)
    for wrong in (["http://a:1", 2], ["http://a:1", "b"], ["http://me:key@a"]):
        with pytest.raises(ValueError, match="url"):
            ServeConfig.model_validate({"engine": "external", "url": wrong})


def _nested(row: str) -> str:
    """Twelve rows, each with ten aliases of the one before: 10^11 values in a kB."""
    rows = [f"a{n}: &a{n} " + row.replace("?", f"*a{n - 1}") for n in range(1, 12)]
    return "\n".join(["run: r", "a0: &a0 {k: 1}", *rows])


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("c.yaml", _nested(f"{{<<: [{', '.join('?' * 10)}]}}"), "with those of `<<`"),
        ("c.yaml", _nested(f"[{', '.join('?' * 10)}]"), "aliases make more than 20000"),
        ("c.yaml", "stages: &a {<<: *a, x: *a}", "aliases make more than 20000"),
        ("c.yaml", "\n".join(f"k{n}: 1" for n in range(20_000)), "more than 20000 keys and values"),
        ("c.yaml", f"seed: 0x{'f' * 400_000}", "number .* has 400002 characters"),
        ("c.yaml", f"seed: 0{'7' * 5000}", "number .* has 5001 characters"),
        ("c.yaml", f"seed: 1{':1' * 200_000}", "number .* has 400001 characters"),
        ("c.yaml", f"seed: !!float '1{':1' * 5000}.0'", "number .* has 10003 characters"),
        ("c.yaml", f"a: {{? {'stage' * 100_000} : 1}}", "key .* has 500000 characters"),
        ("c.toml", f"{'a.' * 100_000}a = 1", "a key has more than 50 dots"),
        ("c.toml", f"a = {'9' * 400_000}", "is not TOML"),
    ],
)
def test_a_small_file_that_stands_for_endless_much_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, told: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")

    assert main(["lint", str(path)]) == ExitCode.USAGE

    said = capsys.readouterr().err
    assert re.search(told, said)
    assert len(said) < 1000


def test_of_very_many_faults_the_first_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(f"k{n}: 1" for n in range(5000)), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"fault\(s\)(?s:.)*and \d+ more") as raised:
        load_config(SHIPPED, path)

    assert len(str(raised.value).splitlines()) < 60
