"""diagnosis.html: one self-contained page, everything in it escaped."""

from pathlib import Path

import jinja2

from shakedown.files import write_text
from shakedown.hang import page_graph, page_grid
from shakedown.hang.ranges import ranges
from shakedown.hang.view import View
from shakedown.verdict import Verdict

_TEMPLATE = "page.html.j2"


def render(verdict: Verdict) -> str:
    """The page of a diagnosis verdict: below 2 MB whatever the number of ranks."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    view = View(verdict)
    rows = [row["ranks"] for row in view.rows]
    guilty = [view.culprit_ranks.issuperset(ranks) for ranks in rows]
    cells = page_grid.cells_of(rows, view.culprit_ranks)
    small = len(cells) <= page_grid.MAX_CELLS
    return environment.get_template(_TEMPLATE).render(
        view=view,
        verdict=verdict,
        diagnosis=view.diagnosis,
        colour=lambda n: colour(n, guilty=guilty[n]),
        ranges=ranges,
        labels=view.labels,
        cells=cells,
        small=small,
        map=None if small else page_grid.rank_map(cells),
        hosts=page_grid.host_rows(cells, view.hosts, view.labels),
        drawing=page_graph.draw(view.graph),
    )


def write_page(verdict: Verdict, path: Path) -> None:
    """Write the page atomically.

    Raises:
        StorageError: `path` cannot be written.
    """
    write_text(path, render(verdict))


def colour(number: int, *, guilty: bool) -> str:
    """A class's ground, light enough for dark text in both schemes: a class of culprits is orange.

    The others go round from yellow to violet in steps of the golden angle; the lightness changes
    too, because no 64 hues can be told apart.
    """
    if guilty:
        return f"hsl({18 + 9 * (number % 3)} 95% 70%)"
    return f"hsl({70 + round(number * 137.5) % 250} 52% {(74, 66, 82)[number // 8 % 3]}%)"
