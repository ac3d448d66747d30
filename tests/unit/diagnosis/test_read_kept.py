"""No readable line is lost between the readers and the summary, over the corpus."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from corpus import DATA

from shakedown.diagnosis.analyze.raised import shape_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import Facts
from shakedown.diagnosis.placing import build_facts
from shakedown.diagnosis.processes import is_launcher
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import (
    FlightRecord,
    LogDigest,
    LogEvent,
    RasRank,
    Record,
    Stack,
    clean,
)
from shakedown.diagnosis.summary import Seen, Summary, describe_path, summarise
from shakedown.stacks.frames import Frame

FOLDERS = ("outside", "dumps", "logs", "stacks")
CASES = [
    path.parent for name in FOLDERS for path in sorted((DATA / "corpus" / name).rglob("truth.json"))
]
_CLOCK = re.compile(r"^\d\d:\d\d:\d\d ")  # a row of several lines has the time of the first
ENDS = ("traceback", "exit", "abort", "oom", "gpu_error", "node", "cancelled", "job")


def lost(records: list[Record], facts: Facts, summary: Summary) -> Iterator[str]:
    """What was read and neither stands in the summary nor is counted in one of its rows."""
    stacks = "\n".join(row.text for row in summary.stacks)
    said = shape_of("\n".join(row.text for row in (*summary.ended, *summary.logs)))
    for record in records:
        if isinstance(record, Stack):
            kept = _unseen(record, records) or describe_path(_path(record)) in stacks
        elif isinstance(record, LogEvent):
            kept = record.kind not in ENDS or shape_of(clean(record.text, 300))[:60] in said
        elif isinstance(record, LogDigest):
            kept = all(shape_of(_CLOCK.sub("", end.text))[:60] in said for end in record.ends)
        elif isinstance(record, FlightRecord):
            counted = any(record.who.rank in group.views for group in facts.groups)
            kept = counted or not record.operations
        else:
            told = _ranks(summary.groups)
            kept = not (
                isinstance(record, RasRank) and record.missing and str(record.who.rank) not in told
            )
        if not kept:
            yield f"{type(record).__name__} {record.place}: {record.place.text[:80]}"


def _path(stack: Stack) -> Sequence[Frame]:
    return stack.main.frames if stack.main else ()


def _unseen(stack: Stack, records: list[Record]) -> bool:
    """A launcher's or an empty stack, or one that a later look at the process replaces."""
    later = (r for r in records if isinstance(r, Stack) and r.who == stack.who)
    return is_launcher(stack) or not _path(stack) or any(r.sample > stack.sample for r in later)


def _ranks(rows: Sequence[Seen]) -> set[str]:
    """Numbers of the rows, `3-5` as 3, 4 and 5."""
    found = set[str]()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", " ".join(row.text for row in rows)):
        found.update(map(str, range(int(low), int(high or low) + 1)))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_every_record_is_in_the_summary_or_counted(case: Path) -> None:
    evidence = read_paths([case / "input"])
    facts = build_facts(evidence.records)
    summary = summarise(Situation(facts))

    assert list(lost(list(evidence.records), facts, summary)) == []
