"""Our own files: heartbeats, the collector's process table, outcomes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shakedown.core.files import json_as
from shakedown.core.outcome import SCHEMA as OUTCOME
from shakedown.core.outcome import Outcome
from shakedown.core.provenance import CHECK
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import (
    MAX_COUNT,
    BeatRecord,
    GpuUse,
    Identity,
    JobExit,
    NodeState,
    ProcessState,
    Record,
    SourceRef,
    TargetName,
    Unattachable,
    clean,
    pid_of,
    rank_of,
)
from shakedown.monitor.collect.proc import TIMERS
from shakedown.monitor.collect.writer import READ
from shakedown.monitor.heartbeat import COUNTS, RECORD_BYTES, decode
from shakedown.progress.signs import Activity, Beat

# A CRC-32 in hexadecimal, then the record as JSON: see `decode` in monitor/heartbeat.py.
_BEAT = re.compile(rb"^[0-9a-f]{8} \{\"role\":")
COLLECTED, BEATS = "shakedown/collected/1", "shakedown/beats/1"
MAX_IO = 2**60  # bytes; NaN is not below
MAX_WORLD = 100_000
_MAX_SAMPLES = 100  # of one process; a collector takes a handful


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
    """Files with one of our schemas; verdicts of earlier judgements are no evidence.

    Raises:
        ValueError: a file of one of our schemas with other contents.
    """
    if not isinstance(body, Mapping):
        return None
    schema = body.get("schema")
    if schema == OUTCOME:
        return [exit_of(json_as(Outcome, body, unknown="ignore"), source.place())]
    if schema == COLLECTED:
        return _collected(source, json_as(_Collected, body, unknown="ignore"))
    if schema == BEATS:
        return _beats(source, json_as(_Beats, body, unknown="ignore"))
    # An empty list, not None: the file is known and holds no evidence, so no other format tries it.
    return [] if isinstance(schema, str) and schema.startswith("shakedown/") else None


def exit_of(outcome: Outcome, place: SourceRef) -> JobExit:
    """A supervisor's outcome, with texts that are fit to be shown."""
    # Its processes ended well: what is wrong with the result is no matter of theirs.
    refused = any(each.check == CHECK and each.status == "fail" for each in outcome.findings)
    return JobExit(
        state="completed" if refused else outcome.state,
        sentence="every process ended by itself" if refused else clean(outcome.sentence),
        exit_codes={clean(name, 80): code for name, code in outcome.exit_codes.items()},
        failed_component=clean(outcome.failed_component, 80),
        place=place,
        done=outcome.done is True,
        steps_known=bool(outcome.stalled),
        nodes=[clean(node, 80) for node in outcome.nodes],
        rank_nodes=[clean(node, 80) for node in outcome.rank_nodes],
    )


# What slurm_strerror calls SLURM_COMMUNICATIONS_CONNECTION_ERROR: srun found no slurmd on a node.
_NO_SLURMD = "Communication connection failure"


@dataclass(frozen=True)
class _Beats:
    """Heartbeats as a collector copied them. Without their times they still tell the steps."""

    beats: Sequence[Beat]
    round: int | None = None
    taken: Any = None
    began: Any = None


@dataclass(frozen=True)
class _State:
    state: str
    wchan: str = ""
    at: Any = None
    cpu: Any = None
    io: Any = None
    output: Any = None
    timed: Any = None


@dataclass(frozen=True)
class _Target:
    """A process that the collector read; `missed`: what it could not; `inner_pid` as TargetName."""

    pid: int
    name: str = ""
    role: str = ""
    rank: int | None = None
    states: Sequence[_State] = ()
    missed: Sequence[str] = ()
    inner_pid: int | None = None
    world: int = 0


@dataclass(frozen=True)
class _Collected:
    """The table of one node's collector, or of a whole job: what came of each of its nodes."""

    host: str = ""
    targets: Sequence[_Target] = ()
    nodes: Mapping[str, Any] = field(default_factory=dict)


def _beats(source: EvidenceFile, body: _Beats) -> list[Record]:
    number = source.sample if body.round is None or not 0 <= body.round < 1000 else body.round
    times = [_time(body.taken), _time(body.began)]
    found = map(_plausible, body.beats)
    return [BeatRecord(beat, source.place(), number, *times) for beat in found if beat]


def _activity(state: _State) -> Activity | None:
    """None where one of the numbers is missing or cannot be true."""
    # Older collectors looked at the process alone.
    timed = int(state.wchan in TIMERS) if state.timed is None else state.timed
    values = state.at, state.cpu, state.io, state.output, timed
    plausible = all(type(v) in (int, float) and 0 <= v < MAX_IO for v in values)
    return Activity(*values) if plausible and state.at else None


def _time(value: Any) -> float:
    """Unix seconds, 0 where they cannot be true."""
    return float(value) if type(value) in (int, float) and 0 < value < MAX_COUNT else 0.0


def _collected(source: EvidenceFile, body: _Collected) -> list[Record]:
    host = clean(body.host, 80)
    # Process 0 stands for a rank without one.
    known = [
        row for row in body.targets if pid_of(row.pid) or (row.pid == 0 and row.rank is not None)
    ]
    return [
        *(record for row in known for record in _target(source, row, host)),
        # Slurm itself marks a node hundreds of seconds after srun has found nobody on it.
        *(
            _unread(clean(node, 80), clean(str(said)), source)
            for node, said in body.nodes.items()
            if said != READ
        ),
    ]


def _unread(node: str, said: str, source: EvidenceFile) -> NodeState:
    down = _NO_SLURMD in said
    state = "no slurmd answers" if down else said
    return NodeState(node, state, down, source.place(0, said), unread=True)


def _target(source: EvidenceFile, row: _Target, host: str) -> list[Record]:
    who = Identity(rank_of(row.rank), pid_of(row.pid), host, clean(row.role, 100))
    place = source.place(0, clean(row.name))
    inner = pid_of(row.inner_pid)
    world = row.world if 0 <= row.world <= MAX_WORLD else 0
    records: list[Record] = [TargetName(who, clean(row.name, 100), place, world, inner_pid=inner)]
    for sample, each in enumerate(row.states[:_MAX_SAMPLES], start=1):
        letter = clean(each.state, 20)[:1]
        wchan, done = clean(each.wchan, 80), _activity(each)
        records.append(ProcessState(who, letter, wchan, place, sample, done))
    for text in map(clean, row.missed[:_MAX_SAMPLES]):
        # `Operation not permitted` (EPERM), `Permission denied` (EACCES), as py-spy and /proc put
        # it.
        if "permitted" in text or "ermission" in text:
            records.append(Unattachable(who, "denied", source.place(0, text)))
    return records


GPUS = "shakedown/gpus/1"
MAX_GPUS, MAX_CONTEXTS = 1024, 256


def parse_gpus(source: EvidenceFile, body: Any) -> list[Record] | None:
    """One record a process of a GPU; a GPU that did not answer has none."""
    if not isinstance(body, Mapping) or body.get("schema") != GPUS:
        return None
    rows = body.get("gpus")
    host = clean(body.get("host") or "", 80)
    records: list[Record] = []
    for row in rows[:MAX_GPUS] if isinstance(rows, list) else []:
        if isinstance(row, Mapping):
            records += _gpu(source, row, host)
    return records


def _gpu(source: EvidenceFile, row: Mapping[str, Any], host: str) -> list[Record]:
    busy, memory = _percent(row.get("utilisation_percent")), _percent(row.get("memory_percent"))
    pids = row.get("pids")
    found = {p for p in pids[:MAX_CONTEXTS] if pid_of(p)} if isinstance(pids, list) else set[int]()
    if busy is None or not found:
        return []
    watts = row.get("power_watts")
    power = f", {watts} W" if type(watts) is int and 0 <= watts < 10_000 else ""
    moved = "" if memory is None else f", memory {memory} % busy"
    text = f"GPU {clean(row.get('index', '?'), 10)}{f' of {host}' if host else ''}: {busy} % busy"
    place = source.place(0, text + moved + power)
    many = len(found) > 1
    return [GpuUse(Identity(None, pid, host), busy, memory, many, place) for pid in sorted(found)]


def _percent(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= 100 else None
