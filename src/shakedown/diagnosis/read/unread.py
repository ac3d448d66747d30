"""Files of a rank that exist and cannot be read: they say that the rank wrote, but not what."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from shakedown.diagnosis.read.source import EvidenceFile
from shakedown.diagnosis.records import FlightRecord, Identity, Record, SourceRef, Unattachable

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
