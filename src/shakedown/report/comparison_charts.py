"""Geometry of the comparison's three drawings (pure): numbers in, SVG coordinates out."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from shakedown.consistency.compare import Aligned

WIDTH, HEIGHT = 320.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 312.0, 8.0, 176.0
_POINTS = 1500  # dots of the scatter plot, as a page must open quickly


@dataclass(frozen=True)
class Mark:
    """A label at a drawing coordinate."""

    at: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A rectangle and its meaning."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class ChartDrawing:
    """One figure: a title, dots or bars, and the labels of its axes."""

    title: str
    x_label: str
    x_marks: list[Mark]
    y_marks: list[Mark]
    dots: list[tuple[float, float]]
    bars: list[Bar]
    diagonal: bool = False


def drawings(aligned: Aligned, *, seed: int = 0) -> list[ChartDrawing]:
    """Scatter plot of probabilities, histogram of differences, mean difference by position."""
    return [_scatter(aligned, seed), _histogram(aligned), _positions(aligned)]


def _scatter(aligned: Aligned, seed: int) -> ChartDrawing:
    index = np.arange(len(aligned.t))
    if len(index) > _POINTS:
        # The worst tokens are always drawn, the others by chance.
        worst = np.argsort(-np.abs(aligned.r))[: _POINTS // 5]
        others = np.random.default_rng(seed).permutation(np.setdiff1d(index, worst))
        index = np.concatenate([worst, others[: _POINTS - len(worst)]])
    p, q = np.exp(aligned.t[index]), np.exp(aligned.g[index])
    dots = [(_x(float(a)), _y(float(b))) for a, b in zip(p, q, strict=True)]
    marks = [0.0, 0.5, 1.0]
    return ChartDrawing(
        "Probability of each token: engine over reference",
        "reference",
        [Mark(_x(value), f"{value:g}") for value in marks],
        [Mark(_y(value), f"{value:g}") for value in marks],
        dots,
        [],
        diagonal=True,
    )


def _histogram(aligned: Aligned, bins: int = 31) -> ChartDrawing:
    """The histogram: log counts show single outliers; odd `bins` centre one bar on 0."""
    reach = max(float(np.abs(aligned.r).max()), 1e-9)
    counts, edges = np.histogram(aligned.r, bins=bins, range=(-reach, reach))
    top = np.log10(counts.max() + 1)
    bars = []
    for number, count in enumerate(counts):
        height = float(np.log10(count + 1) / top)
        title = f"{edges[number]:.3g} to {edges[number + 1]:.3g}: {count}"
        bars.append(_bar(number, bins, height, title))
    marks = [Mark(_x(place), f"{(2 * place - 1) * reach:.2g}") for place in (0.0, 0.5, 1.0)]
    decades = [10**power for power in range(int(top) + 1)]
    labels = [Mark(_y(float(np.log10(count + 1) / top)), str(count)) for count in decades]
    return ChartDrawing("Tokens by t - g (log scale)", "nats", marks, labels, [], bars)


def _positions(aligned: Aligned, bins: int = 32) -> ChartDrawing:
    """The mean difference by position: growth along the completion points at the decode path, not
    at the weights."""
    last = int(aligned.position.max())
    width = max(1, -(-(last + 1) // bins))  # rounded up: at most `bins` bars
    means = pd.Series(np.abs(aligned.r)).groupby(aligned.position // width).mean()
    means = means.reindex(range(last // width + 1), fill_value=0.0)
    top = max(float(means.max()), 1e-12)
    bars = [
        _bar(
            number,
            len(means),
            float(mean / top),
            f"positions {number * width} to {(number + 1) * width - 1}: {mean:.3g}",
        )
        for number, mean in enumerate(means)
    ]
    return ChartDrawing(
        "Mean |t - g| by position in the completion",
        "position",
        [Mark(_x(0.0), "0"), Mark(_x(1.0), str(last))],
        [Mark(_y(0.0), "0"), Mark(_y(1.0), f"{top:.2g}")],
        [],
        bars,
    )


def _bar(number: int, count: int, height: float, title: str) -> Bar:
    width = (RIGHT - LEFT) / count
    y = _y(height)
    return Bar(
        round(LEFT + number * width, 1), y, round(width * 0.9, 1), round(BOTTOM - y, 1), title
    )


def _x(share: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, share)), 1)


def _y(share: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, share)), 1)
