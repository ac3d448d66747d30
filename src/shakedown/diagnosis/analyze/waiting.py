"""The wait-for graph over process groups: who has not entered what others wait in.

In one group a rank waits for every member that has entered fewer calls than the one it waits in: a
threshold decides, so the graph is kept as two lists a group instead of as pairs, of which there
are millions where half of a large job waits for the other half.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shakedown.diagnosis.groups import GroupFacts
from shakedown.diagnosis.records import Operation


@dataclass(frozen=True)
class Wait:
    """`waiter` has entered collective `seq` of `group`; `awaited` has not."""

    waiter: int
    awaited: int
    group: GroupFacts
    seq: int

    @property
    def operation(self) -> Operation | None:
        return self.group.views[self.waiter].operations.get(self.seq)

    @property
    def why(self) -> str:
        name = self.operation.name if self.operation else "a collective"
        return f"{name}, number {self.seq} of {self.group.label}, not entered"


# Pairs of one group that are all listed: 64 ranks that wait for 64.
PAIRS = 4096


@dataclass(frozen=True)
class GroupWaits:
    """The waits of one group.

    `pending`: the call that each waiting rank is in. `entered`: the last call of each member of
    which a dump tells. `silent`: members of which none tells, awaited in call `open_call`.
    """

    group: GroupFacts
    pending: Mapping[int, int]
    entered: Mapping[int, int]
    silent: Sequence[int] = ()
    open_call: int = 0

    def waiters(self, among: Collection[int] | None = None) -> set[int]:
        """Ranks that wait for at least one member, or for one of `among`."""
        rows = self.entered.items()
        lowest = min((n for m, n in rows if among is None or m in among), default=None)
        found = set() if lowest is None else {r for r, seq in self.pending.items() if seq > lowest}
        if self.silent if among is None else any(m in among for m in self.silent):
            found |= {r for r, seq in self.pending.items() if seq == self.open_call}
        return found

    def awaited(self, among: Collection[int] | None = None) -> set[int]:
        """Members that at least one rank waits for, or one of `among`."""
        rows = self.pending.items()
        calls = {seq for r, seq in rows if among is None or r in among}
        highest = max(calls, default=0)
        found = {m for m, n in self.entered.items() if n < highest}
        return found.union(self.silent) if self.open_call in calls else found

    def missing(self, seq: int) -> Sequence[int]:
        """Members that a rank in call `seq` waits for."""
        if seq == self.open_call:
            return self.silent
        numbers, members = self._by_number
        return sorted(members[: bisect_left(numbers, seq)])

    @cached_property
    def _by_number(self) -> tuple[list[int], list[int]]:
        rows = sorted((n, m) for m, n in self.entered.items())
        return [n for n, _ in rows], [m for _, m in rows]

    def __iter__(self) -> Iterator[Wait]:
        """Every pair."""
        missing: dict[int, Sequence[int]] = {}
        for rank, seq in self.pending.items():
            if seq not in missing:
                missing[seq] = self.missing(seq)
            for member in missing[seq]:
                yield Wait(rank, member, self.group, seq)


class Waits(Iterable[Wait]):
    """The waits of all groups. Iterating gives every pair: ask for the ranks where they suffice."""

    def __init__(self, groups: Sequence[GroupWaits] = ()) -> None:
        self.groups = groups

    def __iter__(self) -> Iterator[Wait]:
        for group in self.groups:
            yield from group

    def __bool__(self) -> bool:
        return bool(self.waiters)

    @cached_property
    def waiters(self) -> set[int]:
        """Ranks that wait for someone."""
        return set().union(*(g.waiters() for g in self.groups))

    @cached_property
    def awaited(self) -> set[int]:
        """Ranks that someone waits for."""
        return set().union(*(g.awaited() for g in self.groups))

    def waiters_of(self, ranks: Collection[int]) -> set[int]:
        """Ranks that wait for at least one of `ranks`."""
        return set().union(*(g.waiters(ranks) for g in self.groups))

    def first_for(self, ranks: Collection[int]) -> Wait | None:
        """The first wait for one of `ranks`."""
        for group in self.groups:
            waiters = group.waiters(ranks)
            waiter = next((r for r in group.pending if r in waiters), None)
            if waiter is not None:
                seq = group.pending[waiter]
                awaited = next(m for m in group.missing(seq) if m in ranks)
                return Wait(waiter, awaited, group.group, seq)
        return None

    def firsts(self, ranks: Collection[int], limit: int) -> dict[int, Wait]:
        """The first wait of each of `ranks`, of `limit` ranks at most."""
        found: dict[int, Wait] = {}
        for group in self.groups:
            waiters = group.waiters()
            for rank, seq in group.pending.items():
                if len(found) == limit:
                    return found
                if rank in ranks and rank in waiters and rank not in found:
                    found[rank] = Wait(rank, group.missing(seq)[0], group.group, seq)
        return found


def find_waits(groups: Iterable[GroupFacts], known: Iterable[int]) -> Waits:
    """Waits from dumps. A member without any dump is awaited only where no other one is behind."""
    dumped = set(known)
    groups = list(groups)
    stale = set().union(*map(_stale, groups))
    return Waits([_group_waits(group, dumped, stale) for group in groups])


def _group_waits(group: GroupFacts, dumped: set[int], stale: set[int]) -> GroupWaits:
    pending = {
        rank: seq
        for rank, view in group.views.items()
        if (seq := view.pending) is not None and rank not in stale
    }
    entered = {m: _entered(group, m) for m in group.members if m in dumped}
    # a collective that is done anywhere was entered everywhere
    done = max((v.completed for v in group.views.values()), default=0)
    # Somebody with a dump is behind and explains the wait, or nobody waits in the first open call:
    # then members without a dump are not suspected.
    if done + 1 not in pending.values() or min(entered.values(), default=done + 1) <= done:
        return GroupWaits(group, pending, entered)
    silent = [m for m in group.members if m not in dumped and m not in group.views]
    return GroupWaits(group, pending, entered, silent, done + 1)


# Done nowhere before every member has taken part, unlike a broadcast or a gather.
_SYMMETRIC = re.compile(r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|barrier")


def _stale(group: GroupFacts) -> set[int]:
    """Ranks that still count as open what the others, who needed them for it, have done.

    Their part was done, but nobody noticed: device or watchdog stands still. What they seem to
    wait for says nothing.
    """
    found = set()
    lowest = sorted(v.completed for v in group.views.values())[:2]
    for rank, view in group.views.items():
        others = lowest[1] if len(lowest) > 1 and view.completed == lowest[0] else lowest[0]
        op = view.operations.get(view.pending) if view.pending else None
        if (
            view.pending
            # With two ranks it is one's word against the other's.
            and len(group.views) > 2
            and others >= view.pending
            and (op is None or _SYMMETRIC.search(op.name))
        ):
            found.add(rank)
    return found


def _entered(group: GroupFacts, rank: int) -> int:
    view = group.views.get(rank)
    return view.enqueued if view else 0


def blockers(waits: Waits) -> list[int]:
    """Ranks that are awaited and wait for nobody themselves."""
    return sorted(waits.awaited - waits.waiters)


def cycle(waits: Waits) -> list[int]:
    """Ranks on cycles of the graph, or on a path between two: what pruning the ends leaves."""
    left = waits.awaited & waits.waiters
    # Each round removes the ranks that wait for nobody who is left, or that nobody left waits for.
    while left:
        waiters = set().union(*(g.waiters(left) for g in waits.groups))
        awaited = set().union(*(g.awaited(left) for g in waits.groups))
        kept = left & waiters & awaited
        if kept == left:
            break
        left = kept
    return sorted(left)
