"""Slow outliers among equal machines, by the rule with the fewest false alarms."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median

SHARE, MODIFIED_Z = 0.95, -3.5
# With fewer than eight others their spread is a guess, and with one or two there is none, so a
# larger difference is required.
FEW, FEW_MODIFIED_Z = 8, -2.5
PAIR, PAIR_SHARE = 2, 0.9


def slow_ones(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Name -> share of the others' median, for those far below it.

    Far below is less than 95 % of the others' median (90 % where they are one or two) AND a
    modified z below -3.5 (-2.5 where they are fewer than eight). Modified z = 0.6745 (x - median)
    / MAD, MAD = median |x - median| of the others (Iglewicz and Hoaglin).
    benchmarks/preflight_pairs.py simulates how often that is right.

    Args:
        values: name -> measurements at different times; higher is better. One's best is compared
            with the others' worst, so that a passing load accuses nobody.
    """
    worst = sorted(min(times) for times in values.values() if times)
    shares = {}
    for name, times in values.items():
        if not times or len(worst) < 2:
            continue
        own = bisect_left(worst, min(times))
        middle = _median_without(worst, own)
        if max(times) < _share(len(worst) - 1) * middle and _far(max(times), middle, worst, own):
            shares[name] = round(max(times) / middle, 3)
    return shares


def _share(others: int) -> float:
    return PAIR_SHARE if others <= PAIR else SHARE


def _median_without(ordered: Sequence[float], left_out: int) -> float:
    """The median of all but one, without making ten thousand lists."""
    count = len(ordered) - 1

    def nth(place: int) -> float:
        return ordered[place if place < left_out else place + 1]

    return (nth((count - 1) // 2) + nth(count // 2)) / 2


def _far(value: float, middle: float, worst: Sequence[float], own: int) -> bool:
    others = [*worst[:own], *worst[own + 1 :]]
    spread = median(abs(each - middle) for each in others)
    limit = FEW_MODIFIED_Z if len(others) < FEW else MODIFIED_Z
    # If all others are equal, any difference is an outlier.
    return spread == 0 or 0.6745 * (value - middle) / spread < limit
