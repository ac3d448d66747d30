"""torchrun's `[default3]:` counts within a node: which rank it is, the files together tell."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import Identity, LogEvent, Record

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


def resolve(records: Sequence[Record], files: Iterable[str]) -> list[Record]:
    """Events with a local rank alone get their rank where it is certain.

    `files`: every log that counts locally. In one a line with both numbers gives the offset of
    its node; a lone such log is of one node, whose local ranks are the ranks.
    """
    offsets = _offsets(records)
    # Of several logs each may be another node's, with the same local ranks.
    alone = len(set(files)) == 1
    return [_resolved(record, offsets, alone=alone) for record in records]


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
