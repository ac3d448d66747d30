"""Process groups matched across ranks by their members, with each rank's counters."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shakedown.hang.records import FlightRecord, GroupStatus, Operation


@dataclass(frozen=True)
class GroupView:
    """One rank's part in a group. `enqueued` and `completed` number its last collectives."""

    enqueued: int
    completed: int
    operations: Mapping[int, Operation]  # by sequence number, collectives only

    @property
    def pending(self) -> int | None:
        """The first collective that was entered and is not done."""
        return self.completed + 1 if self.enqueued > self.completed else None


@dataclass(frozen=True)
class GroupFacts:
    """One process group. A member without a view left no dump, or no trace of this group."""

    description: str
    members: tuple[int, ...]
    views: Mapping[int, GroupView] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)  # rank -> the group's local name

    @property
    def label(self) -> str:
        ranks = ", ".join(map(str, self.members[:8])) + (", ..." if len(self.members) > 8 else "")
        return f"{self.description or 'group'} [{ranks}]"


_Key = tuple[tuple[int, ...], str, int]


def build_groups(records: Mapping[int, FlightRecord], world: tuple[int, ...]) -> list[GroupFacts]:
    """Match groups by (members, description, order of creation among equals).

    `world`: all ranks seen, the members of a default group that does not list its own.
    """
    views: dict[_Key, dict[int, GroupView]] = defaultdict(dict)
    names: dict[_Key, dict[int, str]] = defaultdict(dict)
    for rank, record in sorted(records.items()):
        seen: dict[tuple[tuple[int, ...], str], int] = defaultdict(int)
        for name in sorted(record.groups, key=_by_creation):
            status = record.groups[name]
            members, label = status.members, status.description
            if not members and label == "default_pg":
                members = world
            elif not members:  # gloo keeps no member list for further groups: the name stands in
                label = f"{label} {name}".strip()
            pair = (members, label)
            key = (*pair, seen[pair])
            seen[pair] += 1
            views[key][rank] = _view(record, name, status)
            names[key][rank] = name
    return [
        GroupFacts(key[1], key[0] or tuple(sorted(views[key])), views[key], names[key])
        for key in sorted(views, key=lambda k: (k[0], k[1], k[2]))
        if len(key[0] or views[key]) > 1
    ]


def _by_creation(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (2**31, name)


def _view(record: FlightRecord, name: str, status: GroupStatus) -> GroupView:
    mine = [op for op in record.operations if op.group == name]
    collectives = {op.seq: op for op in mine if not op.p2p}
    if any(op.p2p for op in mine) and len(status.members) != 2:
        # point-to-point calls advance the counters of the two ranks concerned alone
        status = GroupStatus(status.members, status.description)
    done = [seq for seq, op in collectives.items() if op.done]
    # the newest call always has an entry, so entries are believed before the status counters
    enqueued = max(collectives) if collectives else max(status.enqueued, 0)
    completed = max([status.completed, *done, 0])
    first_open = min((seq for seq, op in collectives.items() if not op.done), default=None)
    if first_open is not None and completed >= first_open > max(done, default=0):
        completed = first_open - 1
    return GroupView(enqueued, min(completed, enqueued), collectives)
