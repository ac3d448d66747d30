"""diagnosis.html: one self-contained page, everything in it escaped."""

from pathlib import Path
from typing import Any

import jinja2

from shakedown.files import write_text
from shakedown.verdict import Verdict

_TEMPLATE = "page.html.j2"
MAX_CELLS = 4096  # a larger grid is one cell a class


def render(verdict: Verdict) -> str:
    """The page of a diagnosis verdict."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    diagnosis: dict[str, Any] = dict(verdict.extra["diagnosis"])
    ranks = _cells(diagnosis)
    return environment.get_template(_TEMPLATE).render(
        verdict=verdict,
        hue=hue,
        diagnosis=diagnosis,
        cells=ranks[:MAX_CELLS],
        hidden_cells=max(0, len(ranks) - MAX_CELLS),
        evidence=_evidence(verdict),
        remedies=sorted({f.remedy for f in verdict.findings if f.remedy}),
        skipped=[f for f in verdict.findings if f.check == "read"],
    )


def write_page(verdict: Verdict, path: Path) -> None:
    """Write the page atomically.

    Raises:
        StorageError: `path` cannot be written.
    """
    write_text(path, render(verdict))


def hue(number: int) -> int:
    """A class's colour in degrees: the first is blue, and red is left to the culprits' frame."""
    return 40 + (165 + number * 107) % 290


def _cells(diagnosis: dict[str, Any]) -> list[dict[str, Any]]:
    """One cell a rank: its class number and whether it is a culprit."""
    culprits = set(diagnosis["culprits"]["ranks"])
    cells = [
        {
            "rank": rank,
            "number": number,
            "hue": hue(number),
            "culprit": rank in culprits,
            "waiting_in": row["waiting_in"],
        }
        for number, row in enumerate(diagnosis["classes"])
        for rank in row["ranks"]
    ]
    return sorted(cells, key=lambda cell: cell["rank"])


def _evidence(verdict: Verdict) -> list[str]:
    seen: dict[str, None] = {}
    for finding in verdict.findings:
        for text in finding.evidence:
            seen.setdefault(text)
    return list(seen)
