"""Our own files: heartbeats, the collector's process table, outcomes."""

import re
from collections.abc import Mapping
from typing import Any

from shakedown.hang.heartbeat import RECORD_BYTES, beat_from, decode
from shakedown.hang.parse.source import Source
from shakedown.hang.records import (
    BeatRecord,
    Identity,
    Outcome,
    Place,
    ProcessState,
    Record,
    TargetName,
    Unattachable,
    clean,
)

_BEAT = re.compile(rb"^[0-9a-f]{8} \{\"role\":")
OUTCOME, COLLECTED, BEATS = "shakedown/outcome/1", "shakedown/collected/1", "shakedown/beats/1"


def is_heartbeat(data: bytes) -> bool:
    return len(data) >= RECORD_BYTES and _BEAT.match(data[:40]) is not None


def parse_heartbeat(source: Source) -> list[Record]:
    """A heartbeat file.

    Raises:
        ValueError: the record is torn.
    """
    beat = decode(source.data[:RECORD_BYTES])
    if beat is None:
        raise ValueError("a torn heartbeat record")
    return [BeatRecord(beat, source.place(), source.sample)]


def parse_json(source: Source, body: Any) -> list[Record] | None:
    """Files with one of our schemas; verdicts of earlier judgements are no evidence."""
    if not isinstance(body, Mapping):
        return None
    schema = body.get("schema")
    if schema == OUTCOME:
        return [parse_outcome(body, source.place())]
    if schema == COLLECTED:
        return _collected(source, body)
    if schema == BEATS:
        return _beats(source, body)
    return [] if isinstance(schema, str) and schema.startswith("shakedown/") else None


def parse_outcome(body: Mapping[str, Any], place: Place) -> Outcome:
    """A supervisor's outcome from its JSON form."""
    codes = body.get("exit_codes")
    stalled = body.get("stalled")
    return Outcome(
        state=clean(body.get("state", "?"), 20),
        sentence=clean(body.get("sentence") or ""),
        exit_codes={
            clean(name, 80): code
            for name, code in (codes.items() if isinstance(codes, Mapping) else ())
            if isinstance(code, int)
        },
        failed_component=clean(body.get("failed_component") or "", 80),
        stalled=stalled if isinstance(stalled, Mapping) else {},
        place=place,
    )


def _beats(source: Source, body: Mapping[str, Any]) -> list[Record]:
    rows = body.get("beats")
    found = [beat_from(row) for row in rows] if isinstance(rows, list) else []
    sample = body.get("round")
    number = sample if isinstance(sample, int) else source.sample
    return [BeatRecord(beat, source.place(), number) for beat in found if beat]


def _collected(source: Source, body: Mapping[str, Any]) -> list[Record]:
    records: list[Record] = []
    rows = body.get("targets")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and isinstance(row.get("pid"), int):
            records += _target(source, row, clean(body.get("host") or "", 80))
    return records


def _target(source: Source, row: Mapping[str, Any], host: str) -> list[Record]:
    rank = row.get("rank")
    who = Identity(
        rank if isinstance(rank, int) else None, row["pid"], host, clean(row.get("role") or "", 40)
    )
    place = source.place(0, clean(row.get("name") or ""))
    records: list[Record] = [TargetName(who, clean(row.get("name") or "", 80), place)]
    states = row.get("states")
    for sample, state in enumerate(states if isinstance(states, list) else [], start=1):
        if isinstance(state, Mapping):
            letter, wchan = clean(state.get("state", "?"), 1), clean(state.get("wchan") or "", 80)
            records.append(ProcessState(who, letter, wchan, place, sample))
    missed = row.get("missed")
    for text in missed if isinstance(missed, list) else []:
        if "permitted" in str(text) or "ermission" in str(text):
            records.append(Unattachable(who, "denied", source.place(0, clean(text))))
    return records
