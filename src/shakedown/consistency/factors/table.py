"""The factor table (pure): two scorings of the same tokens that differ in one thing, and its share.

With t the reference's log-probability, g the engine's, and a, b those of a factor's two scorings:

    whole     mean |g - t|
    distance  mean |a - b|
    left      mean |g - t - (a - b)|, the whole with b in a's place (a factor of the reference
              counts with the other sign); in the table, (1 - share) * whole
    share     (1 - left / whole) * sqrt(1 - (floor / distance)^2): noise is not a factor

Rounding has no direction: independent roundings add in squares. For n roundings of that size n *
distance^2 / whole^2 replaces 1 - left / whole, if it is larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shakedown.consistency.compare import Array, align, mean_abs_dlogp

Side = Literal["engine", "reference"]

# A factor is named if it accounts for at least this share of the whole.
NAMED = 0.5
# Shares this close to the largest count as equal: the first of them in the table is named, as the
# table goes from the specific (a cached prefix) to the general (decode against prefill).
_AS_GOOD = 0.1


@dataclass(frozen=True)
class Contrast:
    """Two real scorings of the same tokens that differ in exactly one thing.

    Attributes:
        a, b: a description of each side; `a` is the comparison's own way.
        scores_a, scores_b: log-probabilities in nats, one array [T] per sample, NaN where a token
        was not scored. side: whose scores these are. roundings: how many of the compared sides
        round in the way that `a` and `b` differ; 0: the difference has a direction. note: further
        facts.
    """

    a: str
    b: str
    scores_a: Sequence[Array]
    scores_b: Sequence[Array]
    side: Side
    roundings: int = 0
    note: str = ""


@dataclass(frozen=True)
class FactorRow:
    """One line of the table; numbers are in nats, or None if nothing was measured.

    `share` and `left` are also None for a row that measures the noise itself. `whole` is that of
    the row's own tokens.
    """

    factor: str
    a: str = ""
    b: str = ""
    distance: float | None = None
    floor: float | None = None
    share: float | None = None
    left: float | None = None
    whole: float | None = None
    tokens: int = 0
    note: str = ""
    seconds: float = 0.0


def distance(left: Sequence[Array], right: Sequence[Array]) -> float | None:
    """Mean |difference| over tokens that both scored; None if there are none."""
    aligned = align(left, right)
    return mean_abs_dlogp(aligned) if len(aligned.t) else None


def make_row(
    factor: str,
    contrast: Contrast,
    reference: Sequence[Array],
    engine: Sequence[Array],
    *,
    floor: float,
    seconds: float = 0.0,
) -> FactorRow:
    """The row of a factor; a distance within the noise floor has no share, one near it a reduced
    one."""
    t, g, a, b = _common(reference, engine, contrast.scores_a, contrast.scores_b)
    if not len(t):
        return FactorRow(factor, contrast.a, contrast.b, note="no token was scored on all sides")
    apart, whole = float(np.abs(a - b).mean()), float(np.abs(g - t).mean())
    moved = (g - t) - (a - b if contrast.side == "engine" else b - a)
    explained = 0.0
    if whole > 0:
        explained = max(0.0, 1 - float(np.abs(moved).mean()) / whole)
        explained = max(explained, min(1.0, contrast.roundings * (apart / whole) ** 2))
    # Independent noise adds in squares: the distance without the floor's part.
    above = math.sqrt(1 - (floor / apart) ** 2) if apart > floor else 0.0
    share = above * explained
    return FactorRow(
        factor=factor,
        a=contrast.a,
        b=contrast.b,
        distance=apart,
        floor=floor,
        share=share,
        left=(1 - share) * whole,
        whole=whole,
        tokens=len(t),
        note=contrast.note,
        seconds=seconds,
    )


def largest(rows: Sequence[FactorRow]) -> FactorRow | None:
    """The factor with the largest share of the whole; None if no share is above 0."""
    best = max((row.share or 0.0 for row in rows), default=0.0)
    if best <= 0:
        return None
    return next(row for row in rows if (row.share or 0.0) >= max(best - _AS_GOOD, best / 2))


def named(rows: Sequence[FactorRow]) -> FactorRow | None:
    """The factor that explains the whole, or None."""
    row = largest(rows)
    return row if row and (row.share or 0.0) >= NAMED else None


def explanation(rows: Sequence[FactorRow], whole: float) -> str:
    """The factors' explanation of a whole of that many nats, as the end of a sentence."""
    row = largest(rows)
    if row is None or row.left is None or row.whole is None:
        return f"no measured factor explains it: {whole:.2g} of {whole:.2g} left"
    size = f"{row.left:.2g} of {row.whole:.2g} left"
    said = f"{row.factor} ({row.a} against {row.b}), {row.share:.0%} of mean |dlogp|"
    if (row.share or 0.0) >= NAMED:
        return f"largest factor: {said}, {size}"
    return f"no measured factor explains it: {size} after the largest, {said}"


def _common(*views: Sequence[Array]) -> list[Array]:
    """Each view's numbers [N] at the tokens that all have."""
    joined = [np.concatenate([np.zeros(0), *view]) for view in views]
    kept = np.logical_and.reduce([np.isfinite(each) for each in joined])
    return [each[kept] for each in joined]
