"""Our own files: heartbeats, the collector's process table, outcomes."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shakedown.diagnosis.read.numbers import MAX_COUNT, pid_of, rank_of
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import (
    BeatRecord,
    Identity,
    JobExit,
    ProcessState,
    Record,
    SourceRef,
    TargetName,
    Unattachable,
    clean,
)
from shakedown.monitor.heartbeat import COUNTS, RECORD_BYTES, Beat, beat_from, decode

_BEAT = re.compile(rb"^[0-9a-f]{8} \{\"role\":")
OUTCOME, COLLECTED, BEATS = "shakedown/outcome/1", "shakedown/collected/1", "shakedown/beats/1"


def is_heartbeat(data: bytes) -> bool:
    return len(data) >= RECORD_BYTES and _BEAT.match(data[:40]) is not None


def parse_heartbeat(source: EvidenceFile) -> list[Record]:
    """A heartbeat file.

    Raises:
        ValueError: the record is torn.
    """
    beat = _plausible(decode(source.data[:RECORD_BYTES]))
    if beat is None:
        raise ValueError("a torn heartbeat record")
    return [BeatRecord(beat, source.place(), source.sample)]


def _plausible(beat: Beat | None) -> Beat | None:
    """A beat with names fit to be shown; None when its numbers cannot be true."""
    if beat is None or rank_of(beat.rank) is None:
        return None
    if not all(abs(getattr(beat, name)) < MAX_COUNT for name in COUNTS):
        return None
    if not (0 <= beat.count < MAX_COUNT and abs(beat.wall) + abs(beat.monotonic) < MAX_COUNT):
        return None  # NaN too: it is not below
    if pid_of(beat.pid) is None:
        return None
    return replace(
        beat,
        role=clean(beat.role, 64),
        host=clean(beat.host, 80),
        phase=clean(beat.phase, 20),
    )


def parse_json(source: EvidenceFile, body: Any) -> list[Record] | None:
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


def parse_outcome(body: Mapping[str, Any], place: SourceRef) -> JobExit:
    """A supervisor's outcome from its JSON form."""
    codes = body.get("exit_codes")
    stalled = body.get("stalled")
    return JobExit(
        state=clean(body.get("state", "?"), 20),
        sentence=clean(body.get("sentence") or ""),
        exit_codes={
            clean(name, 80): code
            for name, code in (codes.items() if isinstance(codes, Mapping) else ())
            if type(code) is int and abs(code) < 2**31
        },
        failed_component=clean(body.get("failed_component") or "", 80),
        stalled=stalled if isinstance(stalled, Mapping) else {},
        place=place,
    )


def _beats(source: EvidenceFile, body: Mapping[str, Any]) -> list[Record]:
    rows = body.get("beats")
    found = [_plausible(beat_from(row)) for row in rows] if isinstance(rows, list) else []
    sample = body.get("round")
    number = sample if type(sample) is int and 0 <= sample < 1000 else source.sample
    times = [_time(body.get(key)) for key in ("taken", "began")]
    return [BeatRecord(beat, source.place(), number, *times) for beat in found if beat]


def _time(value: Any) -> float:
    """Unix seconds, 0 where they cannot be true."""
    return float(value) if type(value) in (int, float) and 0 < value < MAX_COUNT else 0.0


def _collected(source: EvidenceFile, body: Mapping[str, Any]) -> list[Record]:
    records: list[Record] = []
    rows = body.get("targets")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, Mapping) and pid_of(row.get("pid")) is not None:
            records += _target(source, row, clean(body.get("host") or "", 80))
    return records


def _target(source: EvidenceFile, row: Mapping[str, Any], host: str) -> list[Record]:
    who = Identity(rank_of(row.get("rank")), row["pid"], host, clean(row.get("role") or "", 40))
    place = source.place(0, clean(row.get("name") or ""))
    records: list[Record] = [TargetName(who, clean(row.get("name") or "", 80), place)]
    states = row.get("states")
    for sample, state in enumerate(_few(states), start=1):
        if isinstance(state, Mapping):
            letter, wchan = (
                clean(state.get("state", "?"), 20)[:1],
                clean(state.get("wchan") or "", 80),
            )
            records.append(ProcessState(who, letter, wchan, place, sample))
    missed = row.get("missed")
    for text in map(clean, _few(missed)):
        if "permitted" in text or "ermission" in text:
            records.append(Unattachable(who, "denied", source.place(0, text)))
    return records


def _few(rows: Any, most: int = 100) -> list[Any]:
    """A collector takes a handful of samples."""
    return rows[:most] if isinstance(rows, list) else []
