"""Geometry of the report's curves: numbers in, SVG coordinates and labels out. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shakedown.report import text
from shakedown.report.series import Point, Series


@dataclass(frozen=True)
class PlotArea:
    """The drawing's size, and the area of the curves in it.

    One unit is about one CSS pixel: a card of the page is 340 to 380 pixels wide.
    """

    width: float = 380
    height: float = 168
    left: float = 46
    right: float = 372
    top: float = 10
    bottom: float = 146


PLOT = PlotArea()


@dataclass(frozen=True)
class Panel:
    """The content of one chart: (column, label) pairs; `stacked` columns add up to a whole."""

    title: str
    columns: Sequence[tuple[str, str]]
    unit: str = ""
    stacked: bool = False


# One row per chart, in reading order; charts without data are left out.
PANELS = (
    Panel("Reward", [("reward_mean", "mean")]),
    Panel("Loss", [("loss", "loss")]),
    Panel("Held-out accuracy", [("sampled_accuracy", "sampled"), ("greedy_accuracy", "greedy")]),
    Panel("Staleness", [("staleness_mean", "mean"), ("staleness_max", "max")], "weight versions"),
    Panel("Mismatch, k3", [("k3", "k3")], "nats"),
    Panel("Mismatch, mean |Δ log p|", [("mean_abs_dlogp", "mean")], "nats"),
    Panel("Entropy", [("entropy", "mean")], "nats per token"),
    Panel("Gradient norm", [("grad_norm", "norm")]),
    Panel(
        "Time per step",
        [("wait_seconds", "wait"), ("train_seconds", "train"), ("sync_seconds", "sync")],
        "s",
        stacked=True,
    ),
)


@dataclass(frozen=True)
class Tick:
    """A grid line at a drawing coordinate."""

    at: float
    label: str


@dataclass(frozen=True)
class Curve:
    """One series of a chart; `slot` (1, 2, 3) chooses the colour.

    `xs`, `ys` are the drawn points' coordinates, `steps`, `values` their data.
    """

    label: str
    slot: int
    path: str
    xs: Sequence[float]
    ys: Sequence[float]
    steps: Sequence[int]
    values: Sequence[str]
    last: str
    area: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart. `description` puts the curves into words."""

    title: str
    unit: str
    curves: Sequence[Curve]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    last_step: int
    description: str
    broken_at: float | None = None
    broken_text: str = ""


def charts(columns: Mapping[str, Series]) -> list[Chart]:
    """A chart for every panel that has data, all over the same range of steps."""
    domain = _steps(columns.values())
    found = []
    for panel in PANELS:
        chosen = [(columns[key], label) for key, label in panel.columns if key in columns]
        if chosen:
            found.append(_chart(panel, chosen, domain))
    return found


# Our own stages have some 50 columns without a panel; a file may have thousands.
MAX_OTHER = 200


def other_charts(columns: Mapping[str, Series]) -> tuple[list[Chart], int]:
    """A chart for every column without a panel, and the number of omitted columns, see
    `MAX_OTHER`."""
    known = {key for panel in PANELS for key, _ in panel.columns}
    domain = _steps(columns.values())
    names = [name for name in columns if name not in known]
    shown = [
        _chart(Panel(text.shorten(name, 40), [(name, "value")]), [(columns[name], "value")], domain)
        for name in names[:MAX_OTHER]
    ]
    return shown, max(0, len(names) - MAX_OTHER)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high]."""
    raw = (high - low) / max(1, count)
    if not (math.isfinite(raw) and raw > 0):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    if power == 0.0:
        return [low]
    # 0.999 and 1e-9: a product that rounding has moved by a bit still counts as the round number.
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _chart(panel: Panel, chosen: Sequence[tuple[Series, str]], domain: tuple[int, int]) -> Chart:
    stacked = panel.stacked and len(chosen) > 1
    shown = [series.means if stacked else series.points for series, _ in chosen]
    tops = _stack(shown) if stacked else shown
    low, high = _range([value for points in tops for _, value in points], from_zero=stacked)
    curves: list[Curve] = []
    below: list[tuple[float, float]] = []
    for slot, ((series, label), real, top) in enumerate(zip(chosen, shown, tops, strict=True), 1):
        xy = [(_x(step, domain), _y(value, low, high)) for step, value in top]
        area = ""
        if stacked and xy:
            floor = below or [(xy[0][0], PLOT.bottom), (xy[-1][0], PLOT.bottom)]
            area = _path([*xy, *reversed(floor)]) + "Z"
            below = xy
        curves.append(_curve(label, slot, series, real, xy, area=area))
    broken = [series for series, _ in chosen if series.first_broken is not None]
    return Chart(
        title=panel.title,
        unit=panel.unit,
        curves=curves,
        x_ticks=[Tick(_x(step, domain), text.number(step)) for step in _step_ticks(domain)],
        y_ticks=[Tick(_y(v, low, high), _tick_label(v, high)) for v in ticks(low, high)],
        last_step=max(series.last_step for series, _ in chosen),
        description="; ".join(_words(label, series) for series, label in chosen),
        broken_at=_x(broken[0].first_broken or 0, domain) if broken else None,
        broken_text=_broken_words(broken[0]) if broken else "",
    )


def _curve(
    label: str,
    slot: int,
    series: Series,
    real: Sequence[Point],
    xy: Sequence[tuple[float, float]],
    *,
    area: str,
) -> Curve:
    return Curve(
        label=label,
        slot=slot,
        path=_path(xy),
        xs=[round(x, 1) for x, _ in xy],
        ys=[round(y, 1) for _, y in xy],
        steps=[step for step, _ in real],
        values=[text.number(value) for _, value in real],
        last=text.number(series.last),
        area=area,
    )


def _stack(layers: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """Running sums over the layers; a layer counts as 0 where it has no value."""
    height: dict[int, float] = {step: 0.0 for layer in layers for step, _ in layer}
    sums: list[list[Point]] = []
    for layer in layers:
        for step, value in layer:
            height[step] += value
        sums.append([(step, height[step]) for step, _ in layer])
    return sums


def _range(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    """The y range: from 0 where the data come near it, never empty."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero or 0 <= low <= 0.5 * high:
        low = min(0.0, low)
    # Equal up to rounding: stretched over the chart, the noise would look like a curve.
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (0.0, high + pad) if low == 0 else (low - pad, high + pad)
    # Values near the largest float overflow when their range is taken.
    if not math.isfinite((high - low) * 1.05):
        return -1.7e308 / 4, 1.7e308 / 4
    top = high + 0.05 * (high - low)
    return (low if low == 0 else low - 0.05 * (high - low)), top


def _steps(columns: Iterable[Series]) -> tuple[int, int]:
    steps = [step for series in columns for step, _ in series.points]
    return (min(steps), max(steps)) if steps else (0, 1)


def _step_ticks(domain: tuple[int, int]) -> list[int]:
    if domain[0] == domain[1]:
        return [domain[0]]
    return sorted({int(v) for v in ticks(*domain, count=5) if v == int(v)})


def _x(step: int, domain: tuple[int, int]) -> float:
    first, last = domain
    if first == last:
        return (PLOT.left + PLOT.right) / 2
    return PLOT.left + (PLOT.right - PLOT.left) * (step - first) / (last - first)


def _y(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low)
    return PLOT.bottom - (PLOT.bottom - PLOT.top) * min(1.0, max(0.0, share))


def _path(xy: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(xy))


def _tick_label(value: float, high: float) -> str:
    # Rounding errors of steps such as 0.1 at zero would be labelled 1e-17.
    return "0" if abs(value) < 1e-9 * abs(high) else text.number(value)


def _words(label: str, series: Series) -> str:
    if not series.count:
        return f"{label}: no finite value"
    first, last, low, high = map(text.number, (series.first, series.last, series.low, series.high))
    return f"{label}: first {first}, last {last}, lowest {low}, highest {high}"


def _broken_words(series: Series) -> str:
    rows = text.plural(series.broken, "row")
    return f"{series.name} is NaN or infinite from step {series.first_broken:,} ({rows})"
