"""The wait-for graph over process groups: who has not entered what others wait in."""

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
    for group in groups:
        by_seq: dict[int, list[int]] = {}
        for rank, view in group.views.items():
            seq = view.pending
            if seq is None:
                continue
            if seq not in by_seq:
                by_seq[seq] = _missing(group, seq, dumped)
            waits += [Wait(rank, m, group, seq) for m in by_seq[seq] if m != rank]
    return waits


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
