"""Allocations of stages, judged before anything is started."""

from pathlib import Path

import pytest

from shakedown.commands.lint import findings_of
from shakedown.config import load_config
from shakedown.config.lint import trainer_world

DEMO = Path(__file__).parents[2] / "config" / "config.yaml"


def _with(tmp_path: Path, allocation: str, batch_size: int = 128) -> Path:
    path = tmp_path / "change.yaml"
    path.write_text(f"stages: {{sft: {{allocation: '{allocation}', batch_size: {batch_size}}}}}\n")
    return path


@pytest.mark.parametrize(
    ("allocation", "world"),
    [
        ("megatron:d1t2", 2),
        ("megatron:d2t1p1", 2),
        ("megatron:p2t1", 2),
        ("megatron:d2p1t8", 16),
        ("fsdp:d4", 4),
    ],
)
def test_an_allocation_that_an_engine_can_do_is_sound(
    tmp_path: Path, allocation: str, world: int
) -> None:
    config = load_config(DEMO, _with(tmp_path, allocation))

    assert findings_of(config) == []
    assert trainer_world(config.stages["sft"]) == world


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        ("fsdp:t2", "fsdp with no dimensions but d"),
        ("megatron:d2c2", "megatron with no dimensions but d, p, t"),
        ("megatron:(attn:d2|ffn:e2)", "megatron with no dimensions but d, p, t"),
        ("archon:d2", "a training engine: fsdp, megatron"),
    ],
)
def test_an_allocation_that_no_engine_can_do_is_found(
    tmp_path: Path, allocation: str, expected: str
) -> None:
    found = findings_of(load_config(DEMO, _with(tmp_path, allocation)))

    assert [(f.subject, f.expected) for f in found] == [("stages.sft.allocation", expected)]


@pytest.mark.parametrize(("allocation", "sound"), [("megatron:t3", True), ("megatron:d3", False)])
def test_a_batch_is_shared_by_the_data_ranks_alone(
    tmp_path: Path, allocation: str, sound: bool
) -> None:
    found = findings_of(load_config(DEMO, _with(tmp_path, allocation, batch_size=4)))

    assert [f.check for f in found] == ([] if sound else ["batch"])
