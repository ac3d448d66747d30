"""Allocations of stages, judged before anything is started."""

from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.cluster.allocation import TRAINING
from shakedown.config import load_config
from shakedown.config.capacity import ranks_per_node
from shakedown.config.lint import trainer_world
from shakedown.core.verdict import Finding
from shakedown.training.engines import DIMENSIONS, ENGINES
from shakedown.training.lint import faults_of, findings_of, require_sound

DEMO = Path(__file__).parents[3] / "config" / "config.yaml"
EXAMPLES = sorted((DEMO.parent / "examples").glob("*.yaml"))


# Not looked up: nothing is said of its heads and layers, which would not fit every allocation.
HUB_MODEL = """\
model: {source: some/model}
serve: {max_model_len: 1024}
stages: {grpo: {grpo: {max_tokens: 512}}}
"""


def _files(tmp_path: Path, change: Path) -> list[Path]:
    """The demo with a model of the hub, and a change over it."""
    model = tmp_path / "model.yaml"
    model.write_text(HUB_MODEL, encoding="utf-8")
    return [DEMO, model, change]


def _with(tmp_path: Path, allocation: str, batch_size: int = 128) -> Path:
    path = tmp_path / "change.yaml"
    stages = f"stages: {{sft: {{allocation: '{allocation}', batch_size: {batch_size}}}}}\n"
    path.write_text(stages, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("backend", "letter"), [(name, letter) for name in DIMENSIONS for letter in "dtpce"]
)
def test_an_engine_has_the_dimensions_of_its_row_and_no_others(
    tmp_path: Path, backend: str, letter: str
) -> None:
    row = DIMENSIONS[backend]

    found = findings_of(load_config(*_files(tmp_path, _with(tmp_path, f"{backend}:{letter}2"))))

    said = [(f.subject, f.expected.splitlines()[0]) for f in found]
    no_row = f"{backend} with no dimensions but {', '.join(sorted(row))}"
    no_grammar = (
        f"allocation: fsdp cannot split by {letter!r}; use megatron or archon (character 6)"
    )
    expected = no_grammar if (backend, letter) in {("fsdp", "p"), ("fsdp", "e")} else no_row
    assert said == ([] if letter in row else [("stages.sft.allocation", expected)])


def test_every_engine_has_a_row_of_dimensions() -> None:
    assert DIMENSIONS.keys() == ENGINES.keys() <= set(TRAINING)
    assert all(row <= set("dtpce") for row in DIMENSIONS.values())


@pytest.mark.parametrize(
    ("allocation", "world"),
    [
        ("megatron:d2p1t8", 16),
        ("megatron:d2t1p1", 2),
        ("fsdp:d4", 4),
        ("fsdp:d2t2", 4),
        ("fsdp:d4t1p1", 4),
        ("archon:d2t1p2", 4),
    ],
)
def test_an_allocation_that_an_engine_can_do_is_sound(
    tmp_path: Path, allocation: str, world: int
) -> None:
    config = load_config(*_files(tmp_path, _with(tmp_path, allocation)))

    assert findings_of(config) == []
    assert trainer_world(config.own_stages["sft"]) == world


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        ("megatron:(attn:d2|ffn:e2)", "megatron with no dimensions but d, p, t"),
        ("vllm:d2", f"a training engine: {', '.join(sorted(DIMENSIONS))}"),
        ("fsdp:d2+vllm:d1", "the one part of the trainer"),
    ],
)
def test_an_allocation_that_no_engine_can_do_is_found(
    tmp_path: Path, allocation: str, expected: str
) -> None:
    found = findings_of(load_config(*_files(tmp_path, _with(tmp_path, allocation))))

    assert [(f.subject, f.expected) for f in found] == [("stages.sft.allocation", expected)]


@pytest.mark.parametrize(("allocation", "sound"), [("megatron:t3", True), ("megatron:d3", False)])
def test_a_batch_is_shared_by_the_data_ranks_alone(
    tmp_path: Path, allocation: str, sound: bool
) -> None:
    found = findings_of(load_config(*_files(tmp_path, _with(tmp_path, allocation, batch_size=4))))

    assert [f.check for f in found] == ([] if sound else ["batch"])


GPUS = "cluster: {nodes: 2, gpus_per_node: 8, gpu_model: h100}\n"


def _findings(tmp_path: Path, overlay: str) -> list[Finding]:
    path = tmp_path / "change.yaml"
    path.write_text(overlay, encoding="utf-8")
    return findings_of(load_config(*_files(tmp_path, path)))


@pytest.mark.parametrize(
    ("overlay", "subject", "words"),
    [
        (
            GPUS + "stages: {grpo: {allocation: 'fsdp:d16', nodes: 2}}",
            "stages.grpo.allocation",
            "vllm:d1+fsdp:d16 needs 17 GPUs, the cluster has 2 x 8",
        ),
        (
            GPUS + "stages: {grpo: {allocation: 'fsdp:d8'}}",
            "stages.grpo.allocation",
            "vllm:d1+fsdp:d8 needs 9 GPUs, the cluster has 1 x 8",
        ),
        (
            GPUS + "stages: {sft: {allocation: 'fsdp:d32', nodes: 2}}",
            "stages.sft.allocation",
            "fsdp:d32 needs 32 GPUs, the cluster has 2 x 8",
        ),
        (
            GPUS + "serve: {allocation: 'vllm:d4t4'}",
            "serve.allocation",
            "take a smaller d, t: a server runs on one node",
        ),
        (
            "cluster: {gpus_per_node: 2, gpu_model: h100}",
            "stages.grpo.allocation",
            "vllm:d1+fsdp:d2 needs 3 GPUs",
        ),
        ("stages: {sft: {nodes: 2}}", "stages.sft.nodes", "at most cluster.nodes: 1"),
        (
            "cluster: {nodes: 3}\nstages: {sft: {nodes: 3}}",
            "stages.sft.nodes",
            "a divisor of 2 ranks",
        ),
    ],
)
def test_what_does_not_fit_into_the_cluster_is_a_fault_of_its_key(
    tmp_path: Path, overlay: str, subject: str, words: str
) -> None:
    (found,) = _findings(tmp_path, overlay)

    assert (found.status, found.subject) == ("fail", subject)
    assert words in f"{found.expected} {found.remedy}"


@pytest.mark.parametrize(
    "overlay",
    [
        "cluster: {gpus_per_node: 3, gpu_model: h100}",
        GPUS + "serve: {allocation: 'vllm:d4t2'}\n"
        "stages: {grpo: {allocation: 'megatron:t8', nodes: 2}}",
        GPUS + "serve: {share_gpus: true, extra_args: [--gpu-memory-utilization=0.4]}\n"
        "stages: {grpo: {allocation: 'fsdp:d16', nodes: 2, batch_size: 32}}",
    ],
)
def test_what_fits_into_the_cluster_is_sound(tmp_path: Path, overlay: str) -> None:
    assert _findings(tmp_path, overlay) == []


@pytest.mark.parametrize(
    ("overlay", "subject", "words"),
    [
        (
            GPUS + "stages: {sft: {allocation: 'megatron:t16', nodes: 2}}",
            "stages.sft.allocation",
            "a tensor-parallel group of 16 over 2 nodes",
        ),
        (
            "cluster: {gpus_per_node: 2, gpu_model: h100}\nserve: {share_gpus: true}",
            "serve.extra_args",
            "--gpu-memory-utilization beside serve.share_gpus",
        ),
        (
            "cluster: {gpus_per_node: 8, gpu_model: h100}\nserve: {keep: true}",
            "serve.keep",
            "launcher: slurm",
        ),
    ],
)
def test_what_fits_badly_is_a_warning_that_stops_nothing(
    tmp_path: Path,
    overlay: str,
    subject: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = _findings(tmp_path, overlay)
    paths = list(map(str, _files(tmp_path, tmp_path / "change.yaml")))
    config = load_config(*map(Path, paths))

    assert (found.status, found.subject) == ("warn", subject)
    assert words in f"{found.expected} {found.remedy}"
    (sentence,) = require_sound(config, [])
    assert sentence.startswith(f"{subject}: got ")
    assert (main(["lint", *paths]), main(["lint", "--strict", *paths])) == (0, 1)
    assert subject in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_sound(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO.parents[1])

    assert findings_of(load_config(DEMO, example)) == []


@pytest.mark.parametrize("example", ["qwen3-2x8-h100", "qwen3-2x8-h100-megatron"])
def test_a_cluster_example_uses_all_its_gpus(example: str) -> None:
    config = load_config(DEMO, DEMO.parent / "examples" / f"{example}.yaml")
    cluster = config.cluster

    for stage in config.own_stages.values():
        assert trainer_world(stage) == cluster.nodes * cluster.gpus_per_node == 16
        assert ranks_per_node(stage, config.serve, cluster.gpus_per_node) == 8


@pytest.mark.parametrize(
    ("agent", "sound"),
    [
        ("own.py:Mine", True),
        ("my_package.agents:Mine", True),
        ("nowhere.py:Mine", False),
        ("own.py", False),
        (":Mine", False),
        ("own.py:", False),
        ("own.py:a b", False),
    ],
)
def test_an_agent_that_is_not_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, sound: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    own = "class Mine:\n    async def run(self, data, **given):\n        return 1.0\n"
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    overlay = f"agents: {{target: 'own.py:Mine'}}\nstages: {{grpo: {{grpo: {{agent: '{agent}'}}}}}}"

    found = faults_of(_findings(tmp_path, overlay))

    assert {f.subject for f in found} == (set() if sound else {"stages.grpo.grpo.agent"})


def test_a_model_folder_without_a_config_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)

    assert "model.source" in [
        f.subject for f in _findings(tmp_path, "model: {source: models/mine}")
    ]


@pytest.mark.parametrize(
    ("allocation", "nodes", "gpus", "ranks"),
    [
        ("fsdp:d4", 2, 0, 2),
        ("fsdp:d999999", 1, 0, 999999),
        ("fsdp:d8", 2, 8, 4),
        ("megatron:t8", 2, 8, 8),
    ],
)
def test_ranks_a_node_are_those_of_the_fullest_node(
    allocation: str, nodes: int, gpus: int, ranks: int
) -> None:
    shipped = load_config(DEMO)
    stage = shipped.stages["sft"].model_copy(update={"allocation": allocation, "nodes": nodes})

    assert ranks_per_node(stage, shipped.serve, gpus) == ranks


def test_what_lint_finds_has_its_place_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = _with(tmp_path, "fsdp:d3")

    code = main(["lint", str(DEMO), str(overlay)])

    assert code == 2
    assert f"expected a multiple of 3 ranks, at {overlay}:1:" in capsys.readouterr().out
