"""Which component a process is, by its id: on its host, and in its own container."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.records import (
    BeatRecord,
    FlightRecord,
    Identity,
    JobExit,
    LogEvent,
    NodeState,
    Record,
    Stack,
    TargetName,
)

DEFAULT_ROLE = "trainer"  # of who says none
_InContainer = tuple[str, int | None, int | None]  # role, rank, process id


@dataclass(frozen=True)
class Owners:
    """Whose a process is, by host and id. A container's processes have an id of their own there.

    `outer`: the id on its host of a process that its container's id is known of.
    """

    processes: Mapping[tuple[str, int | None], Identity]
    outer: Mapping[_InContainer, int | None]

    def of(self, host: str, pid: int) -> Identity | None:
        return self.processes.get((host, pid)) or self.processes.get(("", pid))

    def outer_pid(self, who: Identity) -> int | None:
        """The host's id of a rank that `who` knows by its container's; None where it does not."""
        return self.outer.get((who.role or DEFAULT_ROLE, who.rank, who.pid))


def find_owners(records: Sequence[Record]) -> Owners:
    """Process id -> component, from every record that knows both. Hosts reuse process ids."""
    processes: dict[tuple[str, int | None], Identity] = {}
    contained = list(_contained(records))
    outer: dict[_InContainer, int | None] = {
        (who.role or DEFAULT_ROLE, who.rank, inner): who.pid for who, inner in contained
    }
    owners = Owners(processes, outer)
    for who in filter(None, map(_known, records)):
        if who.host:
            processes.setdefault((who.host, who.pid), who)
        if owners.outer_pid(who) is None:
            processes.setdefault(("", who.pid), who)
    # Every container has its process 1 and 7: one that two ranks bear tells neither.
    claims: dict[tuple[str, int], set[Identity]] = defaultdict(set)
    for who, inner in contained:
        claims[who.host, inner].add(who)
        claims["", inner].add(who)
    for key, found in claims.items():
        if len(found) == 1:
            processes.setdefault(key, *found)
    return owners


def _known(record: Record) -> Identity | None:
    """Of a record that knows rank and process; None of any other."""
    if isinstance(record, BeatRecord):
        beat = record.beat
        return Identity(beat.rank, beat.pid, beat.host, beat.role)
    # A child may bear its rank's number in a file name: its own process is not the rank.
    child = isinstance(record, Stack) and record.parent_pid is not None
    if isinstance(record, NodeState | JobExit) or child:
        return None
    who = record.who
    return None if who.pid is None or who.rank is None else who


def _contained(records: Iterable[Record]) -> Iterator[tuple[Identity, int]]:
    """Ranks in containers, and their ids there, as the collectors' tables tell."""
    for record in records:
        who = _known(record)
        if isinstance(record, TargetName) and record.inner_pid is not None and who is not None:
            yield who, record.inner_pid


def ranks_of_engine(records: Sequence[Record]) -> tuple[Sequence[Record], bool]:
    """An inference engine's own ranks count where no other ranks are in evidence."""
    if any(map(_of_trainer, records)) or not any(map(_in_engine, records)):
        return [r for r in records if not _is_table(r)], False
    return [_as_rank(r) for r in records], True


def _is_table(record: Record) -> bool:
    """By a log; the collector's own table names its rows."""
    return isinstance(record, TargetName) and bool(record.who.role) and not record.name


def _in_engine(record: Record) -> bool:
    if not isinstance(record, LogEvent | TargetName | Stack):
        return False
    by_log = not isinstance(record, TargetName) or not record.name
    return by_log and record.who.role == ENGINE and record.who.rank is not None


def _as_rank(record: Record) -> Record:
    if _in_engine(record) and isinstance(record, LogEvent | TargetName | Stack):
        return replace(record, who=replace(record.who, role=""))
    return record


_ENGINE_FILE = re.compile(r"(?:^|/)(?:vllm|sglang)/")


def _of_trainer(record: Record) -> bool:
    """Whether it names a rank that is no engine's."""
    if isinstance(record, BeatRecord):
        return True
    if not isinstance(record, Stack | FlightRecord | LogEvent) or record.who.rank is None:
        return False
    frames = [f for t in record.threads for f in t.frames] if isinstance(record, Stack) else []
    return not _in_engine(record) and not any(_ENGINE_FILE.search(f.file) for f in frames)
