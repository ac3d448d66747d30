"""Point-to-point calls, which collectives' sequence numbers do not cover.

A send is done when its peer has posted the receive, and the other way round: what two ranks post
first between them has to fit together.
"""

import re
from dataclasses import dataclass

from shakedown.diagnosis.analyze.places import Placed
from shakedown.diagnosis.records import FlightRecord, Operation

# `nccl:send 0->1`, `nccl:recv 1<-0`: ranks within the group, the own one first.
_CALL = re.compile(r"(?:^|:)(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")


@dataclass(frozen=True)
class Post:
    """A point-to-point call that is not done: `rank` sends to `peer`, or receives from it."""

    rank: int
    peer: int
    sends: bool
    operation: Operation

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.operation.sizes if self.sends else self.operation.output_sizes

    def __str__(self) -> str:
        return f"{'send to' if self.sends else 'receive from'} rank {self.peer}"


def posts_of(s: Placed, rank: int) -> dict[int, list[Post]]:
    """By peer: the first calls that are not done. Those of one batch are posted together."""
    record = s.ranks[rank].record
    found: dict[int, list[Post]] = {}
    undone = [op for op in record.operations if op.p2p and not op.done] if record else []
    for op in sorted(undone, key=lambda o: o.order):
        post = _post(s, rank, record, op) if record else None
        if post is None:
            continue
        batch = found.setdefault(post.peer, [])
        # Calls of one batch share a number, and none of them waits for the one before.
        if not batch or (op.group, op.seq) == (batch[0].operation.group, batch[0].operation.seq):
            batch.append(post)
    return found


def _post(s: Placed, rank: int, record: FlightRecord, op: Operation) -> Post | None:
    match = _CALL.search(op.name)
    status = record.groups.get(op.group)
    members = (status.members if status else ()) or tuple(sorted(s.expected_ranks))
    # The group's member list turns its numbers into ranks of the job.
    if match is None or max(int(match[2]), int(match[3])) >= len(members):
        return None
    return Post(rank, members[int(match[3])], match[1] == "send", op)


class FinishedCalls:
    """The sends and receives that each rank is through with, by peer, in their order."""

    def __init__(self, s: Placed) -> None:
        self._placed = s
        self._ranks: dict[int, dict[tuple[int, bool], list[Post]]] = {}

    def by_peer(self, post: Post) -> Post | None:
        """The peer's side of a call that is still open here, where the peer is through with it.

        A batch ends as a whole: a part of it that has met its other half stays open with the rest.
        """
        mine = self._of(post.rank).get((post.peer, post.sends), [])
        theirs = self._of(post.peer).get((post.rank, not post.sends), [])
        return theirs[len(mine)] if len(theirs) > len(mine) else None

    def _of(self, rank: int) -> dict[tuple[int, bool], list[Post]]:
        if rank not in self._ranks:
            found = self._ranks[rank] = {}
            component = self._placed.ranks.get(rank)
            record = component.record if component else None
            calls = [op for op in record.operations if op.p2p and op.done] if record else []
            for op in sorted(calls, key=lambda op: op.order):
                post = _post(self._placed, rank, record, op) if record else None
                if post is not None:
                    found.setdefault((post.peer, post.sends), []).append(post)
        return self._ranks[rank]
