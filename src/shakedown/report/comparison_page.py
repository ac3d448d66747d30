"""report.html: verdict, factors, metrics with intervals, drawings, the worst tokens in context."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shakedown import __version__
from shakedown.consistency.factors.table import FactorRow
from shakedown.consistency.grade import status_by
from shakedown.consistency.run import Comparison
from shakedown.core.files import write_text
from shakedown.core.paths import ComparisonPaths
from shakedown.core.verdict import Verdict
from shakedown.core.visible import masked
from shakedown.report import comparison_charts, text
from shakedown.report.comparison_tables import sample_lines, token_lines
from shakedown.report.text import page_environment

_WORST = 20  # tokens shown
_CONTEXT = 12  # tokens shown before; half as many after
_LONGEST = 200  # characters of one token's text


@dataclass(frozen=True)
class WorstToken:
    """A token with its neighbours; log-probabilities in nats."""

    sample: int
    position: int
    token: int
    before: str
    text: str
    after: str
    reference: float
    engine: float


@dataclass(frozen=True)
class MetricRow:
    """One line of the metrics table; `status` is empty for a metric without a limit."""

    name: str
    value: str
    low: str
    high: str
    limit: str
    status: str


@dataclass(frozen=True)
class FactorLine:
    """One line of the factor table, as text; empty where nothing was measured."""

    factor: str
    a: str
    b: str
    distance: str
    floor: str
    share: str
    left: str
    whole: str
    tokens: str
    note: str
    seconds: str


def write_report(result: Comparison, verdict: Verdict, out: Path) -> None:
    """Write `report.html`, one self-contained file.

    Raises:
        StorageError: the folder cannot be written.
    """
    html = render_report(result, verdict)
    write_text(ComparisonPaths(out).page, html.encode("utf-8", "replace").decode("utf-8"))


def render_report(result: Comparison, verdict: Verdict) -> str:
    """The page as text: no network, no scripts; every text from the run is escaped."""
    explained = result.explained
    return (
        page_environment()
        .get_template("comparison.html")
        .render(
            verdict=verdict,
            result=result,
            factors=[factor_row(row) for row in (*explained.rows, *explained.noise)],
            explained=explained,
            metrics=metric_rows(result),
            worst=worst_tokens(result),
            samples=sample_lines(result),
            tokens=token_lines(result),
            line=lambda ids: _text(result, ids),
            flips=[d for d in result.divergences if d is not None][:_WORST],
            drawings=comparison_charts.drawings(result.aligned, seed=result.plan.seed),
            plot=comparison_charts,
            duration=text.duration,
            token_text=lambda token: text.shorten(masked(result.decode(token)), 60),
            shakedown_version=__version__,
        )
    )


def factor_row(row: FactorRow) -> FactorLine:
    """Numbers as text; a row without a measurement has only its reason."""
    return FactorLine(
        row.factor,
        row.a,
        row.b,
        _number(row.distance),
        _number(row.floor),
        "" if row.share is None else f"{row.share:.0%}",
        _number(row.left),
        _number(row.whole),
        "" if row.distance is None else str(row.tokens),
        row.note,
        text.duration(row.seconds) if row.distance is not None else "",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def metric_rows(result: Comparison) -> list[MetricRow]:
    """Every metric with its interval and, if the grade has one, its limit."""
    limits = result.explained.chosen.limits
    rows = []
    for name, metric in result.metrics.items():
        bound = limits.get(name)
        rows.append(
            MetricRow(
                name,
                f"{metric.value:.4g}",
                f"{metric.low:.4g}",
                f"{metric.high:.4g}",
                f"{bound.good:g} / {bound.poor:g}" if bound else "",
                status_by(metric.value, bound) if bound else "",
            )
        )
    return rows


def worst_tokens(result: Comparison) -> list[WorstToken]:
    """The tokens with the largest |t - g|, worst first."""
    aligned = result.aligned
    order = np.argsort(-np.abs(aligned.r), kind="stable")[:_WORST]
    rows = []
    for index in order:
        number, position = int(aligned.sample[index]), int(aligned.position[index])
        completion = result.shown[number].completion
        ids = [*completion.prompt.ids, *completion.token_ids]
        place = len(completion.prompt.ids) + position
        rows.append(
            WorstToken(
                sample=completion.prompt.index,
                position=position,
                token=int(ids[place]),
                before=_text(result, ids[max(0, place - _CONTEXT) : place]),
                text=_text(result, ids[place : place + 1]),
                after=_text(result, ids[place + 1 : place + 1 + _CONTEXT // 2]),
                reference=float(aligned.t[index]),
                engine=float(aligned.g[index]),
            )
        )
    return rows


def _text(result: Comparison, ids: Sequence[int]) -> str:
    """Tokens on one line, with a visible sign for a line break."""
    joined = "".join(masked(result.decode(int(token))) for token in ids)
    joined = joined.replace("\n", "\N{RETURN SYMBOL}")
    if len(joined) <= _LONGEST:
        return joined
    return joined[: _LONGEST // 2] + "…" + joined[-_LONGEST // 2 :]
