"""diagnosis.html: one self-contained page, everything in it escaped."""

from pathlib import Path

from shakedown.core.files import write_text
from shakedown.core.ranges import ranges
from shakedown.core.verdict import Verdict
from shakedown.report import diagnosis_graph, diagnosis_grid
from shakedown.report.diagnosis_view import View
from shakedown.report.environment import page_environment

_TEMPLATE = "diagnosis.html.j2"


def render(verdict: Verdict) -> str:
    """The page of a diagnosis verdict: below 2 MB whatever the number of ranks."""
    view = View(verdict)
    rows = [row["ranks"] for row in view.rows]
    culprit = [view.culprit_ranks.issuperset(ranks) for ranks in rows]
    cells = diagnosis_grid.cells_of(rows, view.culprit_ranks)
    small = len(cells) <= diagnosis_grid.MAX_CELLS
    return (
        page_environment()
        .get_template(_TEMPLATE)
        .render(
            view=view,
            verdict=verdict,
            diagnosis=view.diagnosis,
            colour=lambda n: colour(n, culprit=culprit[n]),
            ranges=ranges,
            labels=view.labels,
            cells=cells,
            small=small,
            map=None if small else diagnosis_grid.rank_map(cells),
            hosts=diagnosis_grid.host_rows(cells, view.hosts, view.labels),
            drawing=diagnosis_graph.draw(view.graph),
        )
    )


def write_page(verdict: Verdict, path: Path) -> None:
    """Write the page atomically.

    Raises:
        StorageError: `path` cannot be written.
    """
    write_text(path, render(verdict))


def colour(number: int, *, culprit: bool) -> str:
    """A class's ground, light enough for dark text in both schemes: a class of culprits is orange.

    The others go round from yellow to violet in steps of the golden angle; the lightness changes
    too, because no 64 hues can be told apart.
    """
    if culprit:
        return f"hsl({18 + 9 * (number % 3)} 95% 70%)"
    return f"hsl({70 + round(number * 137.5) % 250} 52% {(74, 66, 82)[number // 8 % 3]}%)"
