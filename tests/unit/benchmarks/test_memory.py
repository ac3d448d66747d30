"""The plan of a stage against what ranks really hold."""

from pathlib import Path

import pytest
from training import memory

import shakedown
from shakedown.training.forecast.decoder import read_decoder
from shakedown.training.forecast.trainer import Kinds, Work, highest, total

SOURCE = Path(shakedown.__file__).parents[1]
WITHIN = 0.10


def _predicted(size: memory.Size, work: Work, *, vocabulary: int) -> dict[str, int]:
    """By the kinds of the benchmark; the process holds all of a moment at once, and gradients and
    what is gathered cannot be told apart from the rest of the peak.
    """
    model = read_decoder({"model_type": "qwen3", **size.config(vocabulary)}, size.name)
    moments = highest(model, work)

    def apart(kinds: Kinds) -> int:
        return total(kinds) - kinds["weights"] - kinds["optimizer"]

    top = max(moments.values(), key=total)
    return {
        "weights": top["weights"],
        "optimizer": top["optimizer"],
        "peak of the step": apart(top),
        "total": total(top),
    }


@pytest.mark.slow
def test_the_plan_is_within_a_tenth_of_what_two_ranks_hold(tmp_path: Path) -> None:
    size = memory.SIZES[-1]

    by_layer, logits = memory.measure(tmp_path, {"ours": SOURCE}, ["fsdp:d2"], [size])

    work = Work("fsdp", 2, 1, 1, 4, rows=2, length=16, trained=16, micro_batches=3, gpu=False)
    predicted = _predicted(size, work, vocabulary=memory.VOCABULARY)
    held = dict(by_layer.kinds)
    held["total"] = held["weights"] + held["optimizer"] + held["peak of the step"]
    for kind, expected in predicted.items():
        assert held[kind] == pytest.approx(expected, rel=WITHIN), kind
    rows = memory.LOGITS_TOKENS // 256
    alone = Work("fsdp", 1, 1, 1, 4, rows=rows, length=256, trained=256, micro_batches=1)
    words = memory.LOGITS_VOCABULARY
    expected = _predicted(memory.LOGITS, alone, vocabulary=words)["peak of the step"]
    assert logits.kinds["peak of the step"] == pytest.approx(expected, rel=WITHIN)
