"""What all files together tell: ranks of local ranks, the order of samples, damaged dumps."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shakedown.core.ranges import natural
from shakedown.diagnosis.read.names import ELASTIC, STAMPED, template
from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import (
    FlightRecord,
    Identity,
    LogEnd,
    LogEvent,
    Record,
    SourceRef,
    Stack,
    Unattachable,
)

LOCAL = "local"  # key of an event's detail: the rank within its node
_MARK = re.compile(r"^(?:\S{1,80}: )?\[default-?\d{1,4}\]:", re.M)
_FAILED = "failed (exitcode"
# What says that the launcher is one of several.
_NODES = re.compile(
    r"(?:nnodes|group_world_size|num_nodes|num_machines)\W{1,4}(?:[2-9]|\d{2,5})\b"
    r"|(?:node|group|machine)_?rank\W{1,4}[1-9]",
    re.I,
)


def counts_locally(source: EvidenceFile) -> bool:
    """The log has lines with a local rank."""
    marked = "[default" in source.text and _MARK.search(source.text) is not None
    return marked or (_FAILED in source.text and not of_several_nodes(source))


def of_several_nodes(source: EvidenceFile) -> bool:
    """The log says that its job has more than one node: a local rank alone names none there."""
    return _NODES.search(source.text) is not None


def with_ranks(
    records: Sequence[Record], files: Iterable[str], *, launched: bool = False
) -> list[Record]:
    """Events with a local rank alone get their rank where it is certain.

    Args:
        files: every log that counts locally. In one a line with both numbers gives the offset of
            its node; a lone such log is of one node, whose local ranks are the ranks.
        launched: a log is of a launcher of several ranks. Its ranks are not srun's tasks, of which
            one a node is the launcher.
    """
    offsets = _offsets(records)
    # Of several logs each may be another node's, with the same local ranks.
    alone = len(set(files)) == 1
    shift = _of_folders(records)
    rows = [_shifted(_resolved(r, offsets, alone=alone), shift) for r in records]
    launched = launched or any(isinstance(r, LogEvent) and LOCAL in r.detail for r in rows)
    launched = launched or any(map(ELASTIC.search, {r.place.path for r in rows}))
    return list(map(_of_node, rows)) if launched else rows


def _of_node(record: Record) -> Record:
    """The same event of srun's task without its number, which is a node's."""
    if not isinstance(record, LogEvent) or not record.detail.keys() >= {"task", "node", "how"}:
        return record  # mpirun's words of a rank have a `signal`
    detail = {key: value for key, value in record.detail.items() if key != "task"}
    return replace(record, detail=detail, who=Identity(host=str(record.detail["node"])))


def _folder(record: Record) -> int | None:
    """The local rank that a folder of torchrun's logs is named by."""
    match = ELASTIC.search(record.place.path)
    return int(match[3]) if match else None


def _of_folders(records: Sequence[Record]) -> int:
    """How far the ranks are above the local ranks that torchrun's folders are named by.

    A line `[rank11]:` in a folder 3 tells it, or the summary's `rank : 11 (local_rank: 3)`. Several
    nodes' folders give no rank by their names (see names.py): there lines alone tell one.
    """
    if len({match[1] for r in records if (match := ELASTIC.search(r.place.path))}) > 1:
        return 0
    events = [r for r in records if isinstance(r, LogEvent) and r.who.rank is not None]
    found = {(e.who.rank or 0) - e.detail[LOCAL] for e in events if LOCAL in e.detail}
    found |= {
        e.who.rank - local
        for e in events
        if (local := _folder(e)) is not None and e.who.rank is not None and e.who.rank != local
    }
    return found.pop() if len(found) == 1 else 0


def _shifted(record: Record, shift: int) -> Record:
    if not shift or not isinstance(record, Stack | LogEvent | LogEnd | FlightRecord):
        return record
    local = _folder(record)
    # It says its own rank; or the folder does: the ranks below this node's are those of whole
    # nodes, none of which has more than they are.
    if local is None or record.who.rank != local or local >= shift:
        return record
    return replace(record, who=replace(record.who, rank=local + shift))


def _offsets(records: Sequence[Record]) -> Mapping[str, int]:
    found: dict[str, set[int]] = {}
    for record in records:
        if isinstance(record, LogEvent) and LOCAL in record.detail and record.who.rank is not None:
            offset = record.who.rank - record.detail[LOCAL]
            found.setdefault(record.place.path, set()).add(offset)
    # Several offsets mean that the file holds several nodes' lines: then none is right for all.
    return {path: min(offsets) for path, offsets in found.items() if len(offsets) == 1}


def _resolved(record: Record, offsets: Mapping[str, int], *, alone: bool) -> Record:
    if not isinstance(record, LogEvent) or LOCAL not in record.detail:
        return record
    path, who = record.place.path, record.who
    if who.rank is not None or not (alone or path in offsets):
        return record
    rank = record.detail[LOCAL] + offsets.get(path, 0)
    return replace(record, who=Identity(rank, who.pid, who.host, who.role))


_Series = tuple[str, int, str, str]  # host, process, tool, name without its numbers


def order_moments(records: Sequence[Record]) -> list[Record]:
    """The records with a sample number on every stack of a series of two files or more.

    Only a process id proves that two files speak of one process; names that differ in more than
    numbers may be two views of one moment (with and without native frames).
    """
    series: dict[_Series, set[str]] = defaultdict(set)
    for record in records:
        if (key := _series(record)) is not None:
            series[key].add(record.place.path)
    numbers = {
        key: {path: n for n, path in enumerate(sorted(paths, key=natural), start=1)}
        for key, paths in series.items()
        if len(paths) > 1
    }
    return [
        replace(record, sample=numbers[key][record.place.path])
        if isinstance(record, Stack) and (key := _series(record)) in numbers and key
        else record
        for record in records
    ]


def _series(record: Record) -> _Series | None:
    if not isinstance(record, Stack) or record.sample:
        return None
    process = record.who.pid
    # Where the names are dates and times the rank is proof enough.
    if process is None and record.who.rank is not None and STAMPED.search(record.place.path):
        process = -1 - record.who.rank
    if process is None:
        return None
    return record.who.host, process, record.tool, template(record.place.path)


_SAYS_NOTHING = ("empty", "unknown format")  # a collector may have made the file
_HEAD = 4096
_KEYS = (b'"entries"', b'"pg_config"', b'"pg_status"', b'"nccl_comm_state"')


def why_unread(data: bytes) -> str:
    """The reason to skip a file that no format could read."""
    head = data[:_HEAD]
    # Told by its keys, as JSON that is cut off cannot be parsed.
    if head.lstrip()[:1] == b"{" and any(key in head for key in _KEYS):
        return "a damaged Flight Recorder dump"
    return _SAYS_NOTHING[bool(data)]


def rank_of_unread(
    name: str, identity: Identity, trailing: int | None, reason: str
) -> list[Unattachable]:
    """What a damaged dump tells: a rank that began to write one left no gap in the evidence.

    Without it the rank would pass for one that never wrote, which is a sign of guilt.
    """
    who = EvidenceFile(Path(name), name, b"", identity=identity, trailing=trailing).who()
    # An empty file may have been made by the collector, so it does not show that the rank wrote.
    if reason in _SAYS_NOTHING or who.rank is None or who.role:
        return []
    return [Unattachable(who, "other", SourceRef(name))]


def of_members(unread: Sequence[Unattachable], records: Iterable[Record]) -> list[Unattachable]:
    """Those of ranks that the dumps which could be read list as members.

    Any other file whose name ends with a number, a batch or a checkpoint, is no rank's dump.
    """
    if not unread:
        return []
    lists = {  # by identity: all ranks share the list of all ranks
        id(status.members): status.members
        for record in records
        if isinstance(record, FlightRecord)
        for status in record.groups.values()
    }
    members = set().union(*lists.values())
    return [row for row in unread if row.who.rank in members]
