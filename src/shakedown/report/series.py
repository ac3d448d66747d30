"""Columns of numbers over steps, thinned for drawing: pure.

A curve of 100,000 rows has a few hundred pixels to live in. Rows are cut into buckets; each bucket
keeps its lowest and its highest row, so a spike of a single step is still drawn; the last row
always stays.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

POINTS = 240
# Larger integers have no exact float; a step beyond this is damage.
MAX_STEP = 1 << 53

Point = tuple[int, float]


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


def tabulate(rows: Iterable[Mapping[str, object]]) -> dict[int, Mapping[str, object]]:
    """Rows by step, ascending; of a step that was run again after a resume the last row counts.

    Rows without a whole number of sensible size under `step` are left out.
    """
    table: dict[int, Mapping[str, object]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and abs(step) <= MAX_STEP:
            table[step] = row
    return dict(sorted(table.items()))


def build(table: Mapping[int, Mapping[str, object]], *, limit: int = POINTS) -> dict[str, Series]:
    """A `Series` for every column that holds a number, in order of first appearance.

    Args:
        table: rows by ascending step, as `tabulate` gives them.
        limit: the most points that one series keeps.
    """
    steps = list(table)
    size = max(1, math.ceil(len(steps) / (limit // 2))) if len(steps) > limit else 1
    names = dict.fromkeys(key for row in table.values() for key in row if key != "step")
    made = (_column(name, table, steps, size) for name in names)
    return {series.name: series for series in made if series is not None}


def _column(
    name: str, table: Mapping[int, Mapping[str, object]], steps: Sequence[int], size: int
) -> Series | None:
    cells = [(step, _number(table[step].get(name))) for step in steps]
    numbers = [(step, value) for step, value in cells if value is not None]
    if not numbers:
        return None
    finite = [point for point in numbers if math.isfinite(point[1])]
    broken = [step for step, value in numbers if not math.isfinite(value)]
    points: list[Point] = []
    means: list[Point] = []
    for begin in range(0, len(cells), size):
        part = cells[begin : begin + size]
        bucket = [(s, v) for s, v in part if v is not None and math.isfinite(v)]
        if bucket:
            points += sorted({min(bucket, key=_value), max(bucket, key=_value)})
            # Divided first: a sum of values near the largest float would overflow.
            mean = math.fsum(value / len(bucket) for _, value in bucket)
            means.append((part[len(part) // 2][0], mean))
    if finite and points[-1] != finite[-1]:
        points.append(finite[-1])
    values = [value for _, value in finite]
    return Series(
        name=name,
        points=points,
        means=means,
        count=len(finite),
        first=values[0] if values else math.nan,
        last=values[-1] if values else math.nan,
        low=min(values, default=math.nan),
        high=max(values, default=math.nan),
        last_step=numbers[-1][0],
        broken=len(broken),
        first_broken=broken[0] if broken else None,
    )


def _value(point: Point) -> float:
    return point[1]


def _number(value: object) -> float | None:
    """A float (perhaps NaN), or None for what is not a number; too large an integer is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
