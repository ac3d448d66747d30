"""No readable line is lost between the readers and the summary, over the corpus."""

import re
from collections.abc import Iterator
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
from shakedown.diagnosis.summary import Summary, describe_path, summarise

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
        if isinstance(record, Stack) and not is_launcher(record):
            main = record.main
            if main and main.frames and not _later(record, records):
                if describe_path(main.frames) not in stacks:
                    yield f"stack {record.place}"
        elif isinstance(record, LogEvent) and record.kind in ENDS:
            if shape_of(clean(record.text, 300))[:60] not in said:
                yield f"{record.kind} {record.place}: {record.text[:80]}"
        elif isinstance(record, LogDigest):
            for end in record.ends:
                if shape_of(_CLOCK.sub("", end.text))[:60] not in said:
                    yield f"last line {end.place}: {end.text[:80]}"
        elif isinstance(record, RasRank | FlightRecord) and record.who.rank is None:
            yield f"counters {record.place}"


def _later(stack: Stack, records: list[Record]) -> bool:
    return any(
        isinstance(r, Stack) and r.who == stack.who and r.sample > stack.sample for r in records
    )


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_every_record_is_in_the_summary_or_counted(case: Path) -> None:
    evidence = read_paths([case / "input"])
    facts = build_facts(evidence.records)
    summary = summarise(Situation(facts))

    assert list(lost(list(evidence.records), facts, summary)) == []
