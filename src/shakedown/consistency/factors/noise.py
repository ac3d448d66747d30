"""The noise floor: the same side scores the same tokens again, and in another batch order."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shakedown.consistency.compare import Array
from shakedown.consistency.factors.bench import Bench
from shakedown.consistency.factors.table import Row, Side, distance
from shakedown.core.errors import CannotJudgeError, UsageError


@dataclass(frozen=True)
class Noise:
    """Mean |dlogp| in nats of each side against itself; 0 also where a side cannot score again."""

    engine: float
    reference: float
    rows: Sequence[Row] = ()

    @property
    def largest(self) -> float:
        return max(self.engine, self.reference)

    def of(self, side: Side) -> float:
        return self.engine if side == "engine" else self.reference


def measure_noise(bench: Bench) -> Noise:
    """Two more passes of each side over the same tokens."""
    again = "scored again"
    turned = "scored again in the opposite order"
    rows = [
        _row("engine_noise", again, lambda: (bench.together, bench.engine_scores())),
        _row("engine_noise", turned, lambda: (bench.together, bench.engine_scores(reverse=True))),
        _row("reference_noise", again, lambda: (bench.padded, bench.reference_scores(bench.items))),
        _row("reference_noise", turned, lambda: (bench.padded, _turned(bench))),
    ]
    engine, reference = (
        max((row.distance or 0.0 for row in rows if row.factor == f"{side}_noise"), default=0.0)
        for side in ("engine", "reference")
    )
    return Noise(engine, reference, rows)


def _turned(bench: Bench) -> list[Array]:
    return bench.reference_scores(bench.items[::-1])[::-1]


def _row(factor: str, b: str, passes: Callable[[], tuple[list[Array], list[Array]]]) -> Row:
    begin = time.monotonic()
    try:
        first, second = passes()
    except (CannotJudgeError, UsageError) as error:
        return Row(factor, note=f"not measured: {error.args[0]}")
    apart, tokens = distance(first, second), sum(map(len, first))
    seconds = round(time.monotonic() - begin, 3)
    return Row(factor, "scored once", b, distance=apart, tokens=tokens, seconds=seconds)
