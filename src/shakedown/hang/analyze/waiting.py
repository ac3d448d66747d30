"""The wait-for graph over process groups: who has not entered what others wait in."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shakedown.hang.groups import GroupFacts
from shakedown.hang.records import Operation


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


def find_waits(groups: Iterable[GroupFacts], known: Iterable[int]) -> list[Wait]:
    """Edges from dumps. A member without any dump is awaited only where no other one is behind."""
    dumped = set(known)
    waits: list[Wait] = []
    groups = list(groups)
    stale = set().union(*map(_stale, groups))
    for group in groups:
        by_seq: dict[int, list[int]] = {}
        for rank, view in group.views.items():
            seq = view.pending
            if seq is None or rank in stale:
                continue
            if seq not in by_seq:
                by_seq[seq] = _missing(group, seq, dumped)
            waits += [Wait(rank, m, group, seq) for m in by_seq[seq] if m != rank]
    return waits


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
            and len(group.views) > 2
            and others >= view.pending
            and (op is None or _SYMMETRIC.search(op.name))
        ):
            found.add(rank)
    return found


def _missing(group: GroupFacts, seq: int, dumped: set[int]) -> list[int]:
    """Members that have not entered `seq`; without one, those of which no dump tells."""
    behind = [m for m in group.members if m in dumped and _entered(group, m) < seq]
    # a collective that is done anywhere was entered everywhere
    open_to_all = seq > max(v.completed for v in group.views.values())
    return behind or [m for m in group.members if m not in dumped and open_to_all]


def _entered(group: GroupFacts, rank: int) -> int:
    view = group.views.get(rank)
    return view.enqueued if view else 0


def roots(waits: Sequence[Wait]) -> list[int]:
    """Ranks that are awaited and wait for nobody themselves."""
    return sorted({w.awaited for w in waits} - {w.waiter for w in waits})


def cycle(waits: Sequence[Wait]) -> list[int]:
    """Ranks on cycles of the graph, or on a path between two: what pruning the ends leaves."""
    edges = {(w.waiter, w.awaited) for w in waits}
    while edges:
        waiters, awaited = {a for a, _ in edges}, {b for _, b in edges}
        kept = {(a, b) for a, b in edges if a in awaited and b in waiters}
        if kept == edges:
            break
        edges = kept
    return sorted({rank for edge in edges for rank in edge})
