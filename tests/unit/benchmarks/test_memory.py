"""The plan of a stage against what ranks really hold."""

from pathlib import Path

import pytest
from training import memory

import shakedown

SOURCE = Path(shakedown.__file__).parents[1]
WITHIN = 0.10


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_plan_is_within_a_tenth_of_what_two_ranks_hold(tmp_path: Path) -> None:
    size = memory.SIZES[-1]

    by_layer, logits = memory.measure(tmp_path, {"ours": SOURCE}, ["fsdp:d2"], [size])

    _compare(by_layer, memory.predicted(size, "fsdp:d2"))
    expected = memory.predicted(
        memory.LOGITS,
        "fsdp:d1",
        rows=memory.LOGITS_TOKENS // 256,
        length=256,
        micro_batches=1,
        vocabulary=memory.LOGITS_VOCABULARY,
    )
    peak = "peak of the step"
    assert logits.kinds[peak] == pytest.approx(expected[peak], rel=WITHIN)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "allocation"),
    [
        ("10M", "fsdp:d2"),
        ("50M", "fsdp:d4"),
        ("50M", "fsdp:d1t2"),
        ("50M", "megatron:d1t2"),
        ("50M", "archon:d1p2"),
    ],
)
def test_small_models_and_other_cuts_are_planned_within_a_tenth(
    tmp_path: Path, name: str, allocation: str
) -> None:
    (size,) = [size for size in memory.SIZES if size.name == name]

    held, _logits = memory.measure(tmp_path, {"ours": SOURCE}, [allocation], [size])

    assert _total(held) == pytest.approx(memory.predicted(size, allocation)["total"], rel=WITHIN)


def _compare(held: memory.Memory, predicted: dict[str, int]) -> None:
    for kind, expected in predicted.items():
        found = _total(held) if kind == "total" else held.kinds[kind]
        assert found == pytest.approx(expected, rel=WITHIN), kind


def _total(held: memory.Memory) -> int:
    return sum(held.kinds[kind] for kind in memory.KINDS if kind != "between micro batches")
