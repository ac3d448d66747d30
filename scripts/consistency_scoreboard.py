"""Plant differences between a real vLLM and transformers, and score what compare names for each.

    python scripts/consistency_scoreboard.py [--case TEXT] [--out FILE] [--work FOLDER]

Servers run on this machine, one after the other; cases that need the same one share it. Writes
docs/consistency-scoreboard.md. --case: only those whose names contain TEXT, and no page.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from consistency_troubles import CASES, Case, NotPlantedError, Site, compared, site, told

from shakedown.core.errors import ShakedownError
from shakedown.core.files import write_text

PAGE = Path(__file__).resolve().parents[1] / "docs" / "consistency-scoreboard.md"
_HEAD = """\
# The scoreboard of comparisons

Written by `make consistency-scoreboard`: differences planted between a real vLLM on a CPU and
transformers, one run each, of the demo's random model (0.6M parameters, three layers). The truth of
each was written before its first run. Right: the status is one of those expected, all that must be
named is named, and no other cause is. Seconds are those of `shakedown compare`.
"""


@dataclass(frozen=True)
class Run:
    """One comparison, and what it said."""

    case: Case
    right: bool
    status: str
    named: Sequence[str]
    seconds: float
    summary: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and write the page; returns 1 where a case is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases named so")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="the page")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep models and verdicts here")
    arguments = parser.parse_args(argv)
    cases = [case for case in CASES.values() if arguments.case in case.name]
    with tempfile.TemporaryDirectory(prefix="consistency-") as temporary:
        runs = []
        for run in _runs(cases, arguments.work or Path(temporary)):
            runs.append(run)
            sign = "RIGHT" if run.right else "WRONG"
            print(f"{sign}: {run.case.name}: {run.status} {list(run.named)}", flush=True)
            print(f"  {run.seconds:.0f} s; {run.summary}", flush=True)
    if not arguments.case:
        # In the order in which they are written down.
        write_text(arguments.out, page(sorted(runs, key=lambda run: cases.index(run.case))))
        print(f"written: {arguments.out}")
    return 0 if all(run.right for run in runs) else 1


def _runs(cases: Sequence[Case], root: Path) -> Iterator[Run]:
    root.mkdir(parents=True, exist_ok=True)
    for serving in dict.fromkeys(case.serving for case in cases):
        with site(root, serving) as place:
            for case in cases:
                if case.serving == serving:
                    yield _run(place, case)


def _run(place: Site, case: Case) -> Run:
    begin = time.monotonic()
    try:
        with case.trouble(place) as url:
            begin = time.monotonic()
            verdict = compared(place, case, url)
    except (NotPlantedError, ShakedownError) as error:
        return Run(case, False, "none", (), time.monotonic() - begin, f"not planted: {error}")
    took = time.monotonic() - begin
    return Run(case, case.is_right(verdict), verdict.status, told(verdict), took, verdict.summary)


def page(runs: Sequence[Run]) -> str:
    """The scoreboard as Markdown."""
    right = sum(run.right for run in runs)
    lines = [
        _HEAD,
        f"In all: {right} of {len(runs)} right.",
        "",
        "| planted | expected | found | right | s |",
        "| --- | --- | --- | --- | --: |",
    ]
    for run in runs:
        lines.append(
            f"| {run.case.name} | {_said(' or '.join(run.case.status), run.case.named)} | "
            f"{_said(run.status, run.named)} | {'yes' if run.right else 'no'} | "
            f"{run.seconds:.0f} |"
        )
    for run in runs:
        if not run.right:
            lines += ["", f"Not right, {run.case.name}: {run.summary}"]
    return "\n".join(lines) + "\n"


def _said(status: str, named: Sequence[str]) -> str:
    return ", ".join([status, *(f"`{_cell(each)}`" for each in named)])


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")[:100]


if __name__ == "__main__":
    sys.exit(main())
