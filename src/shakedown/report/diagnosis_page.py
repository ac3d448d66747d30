"""diagnosis.html: one self-contained page, everything in it escaped."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from shakedown.core.files import write_text
from shakedown.core.paths import AttemptPaths, RunPaths
from shakedown.core.ranges import ranges
from shakedown.core.verdict import Verdict
from shakedown.report import diagnosis_graph, diagnosis_grid
from shakedown.report.diagnosis_view import View, has_frames
from shakedown.report.text import page_environment, plural

_TEMPLATE = "diagnosis.html.j2"


@dataclass(frozen=True)
class Origin:
    """The attempt that a page is about; its links are relative to the stage's folder."""

    attempt: AttemptPaths

    @property
    def stage(self) -> Path:
        return self.attempt.root.parent.parent

    @property
    def title(self) -> str:
        """`demo, stage grpo, attempt 2`."""
        run = self.stage.parent.parent.name
        return f"{run}, stage {self.stage.name}, attempt {int(self.attempt.root.name)}"

    @property
    def run_page(self) -> str:
        return self._link(RunPaths(self.stage.parent.parent).report)

    def link(self, place: str) -> str:
        """The link to an evidence file (`round1/x.txt:3`); empty if the file does not exist."""
        name = re.sub(r":\d+$", "", place)
        for path in (self.attempt.evidence / name, self.attempt.root / name):
            with contextlib.suppress(OSError):  # an input's name may be too long for a file
                if path.is_file():
                    return self._link(path)
        return ""

    def _link(self, path: Path) -> str:
        real, stage = path.resolve(), self.stage.resolve()
        inside = real.is_relative_to(stage.parent.parent)
        return quote(os.path.relpath(real, stage)) if inside else ""


def render(verdict: Verdict, origin: Origin | None = None) -> str:
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
            origin=origin,
            diagnosis=view.diagnosis,
            colour=lambda n: colour(n, culprit=culprit[n]),
            ranges=ranges,
            has_frames=has_frames,
            plural=plural,
            labels=view.labels,
            cells=cells,
            small=small,
            map=None if small else diagnosis_grid.rank_map(cells),
            hosts=diagnosis_grid.host_rows(cells, view.hosts, view.labels),
            drawing=diagnosis_graph.draw(view.graph),
        )
    )


def write_page(verdict: Verdict, path: Path, origin: Origin | None = None) -> None:
    """Write the page atomically, with links to the evidence and the run's page of its `origin`.

    Raises:
        StorageError: `path` cannot be written.
    """
    write_text(path, render(verdict, origin))


def colour(number: int, *, culprit: bool) -> str:
    """A class's background, light enough for dark text in both schemes; classes of culprits are
    orange.

    The others run from yellow to violet in steps of the golden angle; the lightness varies too,
    because 64 hues cannot be told apart.
    """
    if culprit:
        return f"hsl({18 + 9 * (number % 3)} 95% 70%)"
    return f"hsl({70 + round(number * 137.5) % 250} 52% {(74, 66, 82)[number // 8 % 3]}%)"
