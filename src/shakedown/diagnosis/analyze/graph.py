"""The wait-for graph: who waits for whom, and what the awaited one has not done.

Every kind of evidence adds its waits as a source: calls of a process group here, the rest in
edges.py. A source keeps sets instead of pairs, of which there are millions where half of a large
job waits for the other half. In one group a rank waits for every member that has entered fewer
calls than the one it waits in: a threshold decides.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Protocol

from shakedown.diagnosis.groups import GroupFacts

Node = int | str  # a rank, or a role such as `orchestrator`


def name_of(node: Node) -> str:
    """`rank 3`, or the role."""
    return f"rank {node}" if isinstance(node, int) else node


@dataclass(frozen=True)
class Wait:
    """`waiter` waits for `awaited`, which has not done what it owes: `entered all_reduce (...)`."""

    waiter: Node
    awaited: Node
    owes: str


class Source(Protocol):
    """Waits that one piece of evidence shows."""

    def waiters(self, among: Collection[Node] | None = None) -> Collection[Node]:
        """Who waits for at least one other, or for one of `among`."""

    def awaited(self, among: Collection[Node] | None = None) -> Collection[Node]:
        """Whom at least one waits for, or one of `among`."""

    def firsts(self) -> Iterator[Wait]:
        """One wait of each waiter."""

    def first_for(self, nodes: Collection[Node]) -> Wait | None:
        """A wait for one of `nodes`."""

    def __iter__(self) -> Iterator[Wait]:
        """Every pair."""


@dataclass(frozen=True)
class Block:
    """Each of `who` waits for each of `whom`."""

    who: Collection[Node]
    whom: Collection[Node]
    owes: str

    def waiters(self, among: Collection[Node] | None = None) -> Collection[Node]:
        met = among is None or any(node in among for node in self.whom)
        return self.who if self.whom and met else ()

    def awaited(self, among: Collection[Node] | None = None) -> Collection[Node]:
        met = among is None or any(node in among for node in self.who)
        return self.whom if self.who and met else ()

    def firsts(self) -> Iterator[Wait]:
        for waiter in self.waiters():
            yield Wait(waiter, next(iter(self.whom)), self.owes)

    def first_for(self, nodes: Collection[Node]) -> Wait | None:
        awaited = next((node for node in self.awaited() if node in nodes), None)
        return None if awaited is None else Wait(next(iter(self.who)), awaited, self.owes)

    def __iter__(self) -> Iterator[Wait]:
        for waiter, awaited in product(self.who, self.whom):
            yield Wait(waiter, awaited, self.owes)


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

    def waiters(self, among: Collection[Node] | None = None) -> Collection[Node]:
        rows = self.entered.items()
        lowest = min((n for m, n in rows if among is None or m in among), default=None)
        found = set() if lowest is None else {r for r, seq in self.pending.items() if seq > lowest}
        if self.silent if among is None else any(m in among for m in self.silent):
            found |= {r for r, seq in self.pending.items() if seq == self.open_call}
        return found

    def awaited(self, among: Collection[Node] | None = None) -> Collection[Node]:
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

    def _owes(self, rank: int, seq: int) -> str:
        op = self.group.views[rank].operations.get(seq)
        return f"entered {op.name if op else 'call'} (number {seq} of {self.group.label})"

    def firsts(self) -> Iterator[Wait]:
        waiters = self.waiters()
        for rank, seq in self.pending.items():
            if rank in waiters:
                yield Wait(rank, self.missing(seq)[0], self._owes(rank, seq))

    def first_for(self, nodes: Collection[Node]) -> Wait | None:
        waiters = self.waiters(nodes)
        rank = next((r for r in self.pending if r in waiters), None)
        if rank is None:
            return None
        seq = self.pending[rank]
        awaited = next(member for member in self.missing(seq) if member in nodes)
        return Wait(rank, awaited, self._owes(rank, seq))

    def __iter__(self) -> Iterator[Wait]:
        missing: dict[int, Sequence[int]] = {}
        for rank, seq in self.pending.items():
            if seq not in missing:
                missing[seq] = self.missing(seq)
            for member in missing[seq]:
                yield Wait(rank, member, self._owes(rank, seq))


class WaitGraph(Iterable[Wait]):
    """The waits of all sources. Iterating gives every pair: ask for nodes where they suffice."""

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        self.sources = sources

    def __iter__(self) -> Iterator[Wait]:
        for source in self.sources:
            yield from source

    def __bool__(self) -> bool:
        return bool(self.waiters)

    @cached_property
    def waiters(self) -> set[Node]:
        """Who waits for someone."""
        return self.waiters_of(None)

    @cached_property
    def awaited(self) -> set[Node]:
        """Whom someone waits for."""
        return set().union(*(source.awaited() for source in self.sources))

    @cached_property
    def roots(self) -> set[Node]:
        """Who is awaited and waits for nobody."""
        return self.awaited - self.waiters

    def waiters_of(self, nodes: Collection[Node] | None) -> set[Node]:
        """Who waits for at least one of `nodes`."""
        return set().union(*(source.waiters(nodes) for source in self.sources))

    def first_for(self, nodes: Collection[Node]) -> Wait | None:
        """A wait for one of `nodes`."""
        return next((w for source in self.sources if (w := source.first_for(nodes))), None)

    def firsts(self, nodes: Collection[Node], limit: int) -> dict[Node, Wait]:
        """The first wait of each of `nodes`, of `limit` nodes at most."""
        found: dict[Node, Wait] = {}
        for wait in (wait for source in self.sources for wait in source.firsts()):
            if len(found) == limit:
                break
            if wait.waiter in nodes:
                found.setdefault(wait.waiter, wait)
        return found

    @cached_property
    def cycle(self) -> list[Node]:
        """Nodes on cycles, or on a path between two: what pruning the ends leaves."""
        left = self.awaited & self.waiters
        # Each round removes who waits for nobody that is left, or for whom nobody left waits.
        while left:
            waiters = self.waiters_of(left)
            awaited = set().union(*(source.awaited(left) for source in self.sources))
            kept = left & waiters & awaited
            if kept == left:
                break
            left = kept
        return sorted(left, key=lambda node: (isinstance(node, str), node))


def group_waits(groups: Iterable[GroupFacts], known: Iterable[int]) -> list[GroupWaits]:
    """Waits from dumps. A member without any dump is awaited only where no other one is behind."""
    dumped = set(known)
    groups = list(groups)
    stale = set().union(*map(_stale, groups))
    return [_group_waits(group, dumped, stale) for group in groups]


def _group_waits(group: GroupFacts, dumped: set[int], stale: set[int]) -> GroupWaits:
    pending = {
        rank: seq
        for rank, view in group.views.items()
        if (seq := view.pending) is not None and rank not in stale
    }
    older = _older(group)
    entered = {m: _entered(group, m) for m in group.members if m in dumped and m not in older}
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


def _older(group: GroupFacts) -> set[int]:
    """Ranks whose dump was taken before those of others: their open call is done by then.

    What they had not entered at that moment convicts nobody. Of few ranks it is rather the device
    that stands still.
    """
    most = max((view.completed for view in group.views.values()), default=0)
    found = {
        rank
        for rank, view in group.views.items()
        if view.pending
        and view.pending <= most
        and (op := view.operations.get(view.pending)) is not None
        and _SYMMETRIC.search(op.name)
    }
    return found if 2 * len(found) > len(group.views) else set()


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
