"""Process groups matched across ranks by their members, with each rank's counters."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shakedown.diagnosis.records import FlightRecord, GroupStatus, Operation


@dataclass(frozen=True, slots=True)
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


_Key = tuple[int, str, int]  # number of the member list, description, order among equals


def build_groups(records: Mapping[int, FlightRecord], world: tuple[int, ...]) -> list[GroupFacts]:
    """Match groups by (members, description, order of creation among equals).

    `world`: all ranks seen, the members of a default group that does not list its own.
    """
    views: dict[_Key, dict[int, GroupView]] = defaultdict(dict)
    names: dict[_Key, dict[int, str]] = defaultdict(dict)
    lists, rank_views = _Numbered(), _Views(_first_number(records.values()))
    for rank, record in sorted(records.items()):
        rank_views.take(record.operations)
        seen: dict[tuple[int, str], int] = defaultdict(int)
        for name in sorted(record.groups, key=_by_creation):
            status = record.groups[name]
            members, label = status.members, status.description
            if not members and label == "default_pg":
                members = world
            elif not members:  # gloo keeps no member list for further groups: the name stands in
                label = f"{label} {name}".strip()
            pair = (lists.number(members), label)
            key = (*pair, seen[pair])
            seen[pair] += 1
            views[key][rank] = rank_views.of(name, status)
            names[key][rank] = name
    found = [(lists.members[key[0]], key) for key in views]
    return [
        GroupFacts(key[1], members or tuple(sorted(views[key])), views[key], names[key])
        for members, key in sorted(found, key=lambda row: (row[0], row[1][1:]))
        if len(members or views[key]) > 1
    ]


def _first_number(records: Iterable[FlightRecord]) -> int:
    """The number of a group's first collective: 1 in torch's own dumps, 0 in some others."""
    rows = (op for record in records for op in record.operations)
    return 0 if any(op.seq == 0 and not op.p2p for op in rows) else 1


class _Numbered:
    """Member lists by number: hashing a list of all ranks once for each rank is quadratic."""

    def __init__(self) -> None:
        self.members: list[tuple[int, ...]] = []
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[tuple[int, ...], int] = {}

    def number(self, members: tuple[int, ...]) -> int:
        """The number of a list that its owner keeps alive."""
        found = self._by_identity.get(id(members))
        if found is None:
            found = self._by_value.setdefault(members, len(self.members))
            if found == len(self.members):
                self.members.append(members)
            self._by_identity[id(members)] = found
        return found


class _Views:
    """Views of one rank's calls by group; a rank with an equal dump shares those of the last."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._operations: Sequence[Operation] = ()
        self._by_group: dict[str, list[Operation]] = {}
        self._views: dict[tuple[object, ...], GroupView] = {}

    def take(self, operations: Sequence[Operation]) -> None:
        """The calls of which views are asked for next."""
        if operations is self._operations:
            return
        self._operations, self._by_group, self._views = operations, {}, {}
        for operation in operations:
            self._by_group.setdefault(operation.group, []).append(operation)

    def of(self, name: str, status: GroupStatus) -> GroupView:
        """The view of one group."""
        # All that the view depends on beside the calls: see `_view`.
        key = (name, len(status.members) == 2, status.enqueued, status.completed)
        if key not in self._views:
            self._views[key] = _view(self._by_group.get(name, ()), status, 1 - self._first)
        return self._views[key]


def _by_creation(name: str) -> tuple[int, str]:
    # torch numbers groups as they are made, so "10" comes after "9". Other names come last.
    return (int(name), "") if name.isdecimal() and len(name) < 10 else (2**31, name)


def _view(mine: Sequence[Operation], status: GroupStatus, shift: int) -> GroupView:
    """`shift`: what is added to all numbers, so that the first one is 1 and 0 means none."""
    collectives = {op.seq + shift: op for op in mine if not op.p2p}
    if any(op.p2p for op in mine) and len(status.members) != 2:
        # point-to-point calls advance the counters of the two ranks concerned alone
        status = GroupStatus(status.members, status.description)
    done = [seq for seq, op in collectives.items() if op.done]
    # the newest call always has an entry, so entries are believed before the status counters
    enqueued = max(collectives) if collectives else max(status.enqueued, 0)
    completed = max([status.completed, *done, 0])
    first_open = min((seq for seq, op in collectives.items() if not op.done), default=None)
    # The counter says done where the call's own entry says open: the entry is believed.
    if first_open is not None and completed >= first_open > max(done, default=0):
        completed = first_open - 1
    return GroupView(enqueued, min(completed, enqueued), collectives)
