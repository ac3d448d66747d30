"""Columns of numbers over steps, thinned for drawing: pure.

A curve of 100,000 rows has only a few hundred pixels. Rows are divided into buckets; each keeps its
lowest and its highest row, so a spike of a single step is still drawn; the last row always stays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# A chart is 326 units wide and a unit is about a pixel: more points would share their pixels.
POINTS = 240

Point = tuple[int, float]
# Rows by ascending step, as read: a cell may contain any JSON.
StepRows = Mapping[int, Mapping[str, object]]


@dataclass(frozen=True)
class Series:
    """One column. `points` are (step, value), thinned; the statistics are over all rows.

    `means` are (middle step, mean) of each bucket, the same buckets for all columns of a table,
    so that columns can be stacked. `broken` counts rows that hold NaN or an infinity.
    """

    name: str
    points: Sequence[Point]
    means: Sequence[Point]
    count: int
    first: float
    last: float
    low: float
    high: float
    last_step: int
    broken: int = 0
    first_broken: int | None = None


def build(table: StepRows, *, limit: int = POINTS) -> dict[str, Series]:
    """A `Series` for every column that holds a number, in order of first appearance.

    Args:
        table: rows by ascending step, as `by_step` gives them.
        limit: the most points that one series keeps, its last row aside.
    """
    import pandas as pd  # imported here, as `shakedown status` reads tables but draws none

    steps = list(table)
    # Two rows of each bucket are kept.
    size = math.ceil(len(steps) / (limit // 2)) if len(steps) > limit else 1
    begins = [place - place % size for place in range(len(steps))]
    middles = [steps[(begin + min(begin + size, len(steps))) // 2] for begin in begins]
    buckets = pd.Series(middles, index=steps, dtype="int64")
    made = {}
    for name in dict.fromkeys(key for row in table.values() for key in row if key != "step"):
        # Column by column, as a DataFrame's labels cannot contain half a surrogate pair, but JSON
        # can.
        cells = [as_number(row.get(name)) for row in table.values()]
        numbers = pd.Series(cells, index=steps, dtype="float64").dropna()
        if len(numbers):
            made[name] = _series(name, numbers, buckets)
    return made


def as_number(value: object) -> float:
    """A cell for pandas: NaN (missing) if it is not a number; a broken number becomes infinite.

    Broken are NaN, the infinities and integers beyond every float. Text is not a number, not even
    `"1"`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.inf
    except OverflowError:
        return math.inf


def _series(name: str, numbers: "pd.Series[float]", buckets: "pd.Series[int]") -> Series:
    """The series of a column's numbers by step; `buckets` maps each step to its bucket's middle
    step."""
    broken = numbers.index[numbers.abs() == math.inf]
    finite = numbers.drop(broken)
    parts = finite.groupby(buckets)
    kept = sorted({*parts.idxmin(), *parts.idxmax(), *finite.index[-1:]})
    # Divided first, as a sum of values near the largest float would overflow.
    means = (finite / parts.transform("size")).groupby(buckets).sum()
    values = finite.tolist()
    return Series(
        name=name,
        points=list(zip(kept, finite[kept], strict=True)),
        means=list(zip(means.index, means, strict=True)),
        count=len(values),
        first=values[0] if values else math.nan,
        last=values[-1] if values else math.nan,
        low=min(values, default=math.nan),
        high=max(values, default=math.nan),
        last_step=int(numbers.index[-1]),
        broken=len(broken),
        first_broken=int(broken[0]) if len(broken) else None,
    )
