"""Question 3 of messages between two ranks, and of splits: sizes and orders that do not fit."""

import math
import re
from collections.abc import Iterator, Sequence

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks
from shakedown.diagnosis.analyze.posts import FinishedCalls, Post, posts_of
from shakedown.diagnosis.analyze.situation import Situation


def point_to_point(s: Situation) -> Hypothesis | None:
    """Neighbours whose first sends and receives do not fit."""
    posts = {rank: posts_of(s, rank) for rank in s.ranks}
    done = FinishedCalls(s)
    # A sender is through with what it sent, also where the receiver expects more.
    for post in (post for by_peer in posts.values() for row in by_peer.values() for post in row):
        other = done.by_peer(post)
        if other and other.sizes != post.sizes and other.sizes and post.sizes:
            return _shapes(s, post, other)
    for mine, theirs in _pairs(posts):
        fitting = [(a, b) for a in mine for b in theirs if a.sends != b.sends]
        if not fitting:
            return _crossed(s, mine[0], theirs[0])
        for a, b in fitting:
            if a.sizes != b.sizes and a.sizes and b.sizes:
                return _shapes(s, a, b)
    return None


def _pairs(posts: dict[int, dict[int, list[Post]]]) -> Iterator[tuple[list[Post], list[Post]]]:
    for rank, by_peer in posts.items():
        for peer, mine in by_peer.items():
            theirs = posts.get(peer, {}).get(rank, [])
            # Each pair once.
            if rank < peer and theirs:
                yield mine, theirs


def _odd_one(s: Situation, a: Post, b: Post) -> list[int]:
    """The one of two ranks that departs from its own earlier steps, where the other does not."""
    calls = {a.rank: a.operation, b.rank: b.operation}
    known = all(s.departure(r, op).known for r, op in calls.items())
    odd = s.departing(calls) if known else []
    return odd if len(odd) == 1 else []


def _crossed(s: Situation, a: Post, b: Post) -> Hypothesis:
    odd = _odd_one(s, a, b)
    return conclude(
        s,
        "pipeline_order",
        f"rank {a.rank} is first to {a} and rank {b.rank} is first to {b}: each waits for the "
        f"other's {'receive' if a.sends else 'send'}"
        + (f"; only {name_ranks(odd)} departs from its earlier steps" if odd else ""),
        ranks=odd,
        sure="seen" if odd else "likely",
        evidence=s.recorded_at((a.rank, b.rank)),
        waits=[Block((x.rank,), (y.rank,), f"posted what fits ({x})") for x, y in ((a, b), (b, a))],
        needed=[] if odd else ["the order in which the schedule means both ranks to post"],
        remedy="post both in one batch (batch_isend_irecv), or let one side receive first",
    )


def _shapes(s: Situation, a: Post, b: Post) -> Hypothesis:
    odd = _odd_one(s, a, b)
    sender, receiver = (a, b) if a.sends else (b, a)
    return conclude(
        s,
        "pipeline_shape_mismatch",
        f"rank {sender.rank} sends {_text(sender.sizes)} and rank {receiver.rank} receives "
        f"{_text(receiver.sizes)}",
        ranks=odd,
        sure="seen" if odd else "likely",
        evidence=s.recorded_at((a.rank, b.rank)),
        waits=[Block((x.rank,), (y.rank,), f"posted what fits ({x})") for x, y in ((a, b), (b, a))],
        needed=[] if odd else ["the shapes that each stage sends and expects"],
    )


def _text(sizes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(list(shape)) for shape in sizes[:4])


_ALL_TO_ALL = re.compile(r"all_?to_?all")


def splits(s: Situation) -> Hypothesis | None:
    """An all-to-all in which all ranks together send more or fewer elements than they receive.

    Each rank's sizes may differ by design; whose are wrong the sums do not tell.
    """
    for group in s.facts.groups:
        pending = sorted({v.pending for v in group.views.values() if v.pending})
        for seq in pending:
            calls = [v.operations.get(seq) for v in group.views.values()]
            known = [op for op in calls if op and op.sizes and op.output_sizes]
            # The sums mean something only over all members.
            if len(known) < len(group.members) or not all(
                _ALL_TO_ALL.search(o.name) for o in known
            ):
                continue
            sent = sum(math.prod(d) for op in known for d in op.sizes)
            received = sum(math.prod(d) for op in known for d in op.output_sizes)
            if sent != received:
                return conclude(
                    s,
                    "size_mismatch",
                    f"in {known[0].name.split(':')[-1]} (number {seq} of {group.label}) the ranks "
                    f"send {sent} elements and receive {received}",
                    sure="likely",
                    evidence=s.recorded_at(sorted(group.views)),
                    needed=["the split sizes that each rank computed, by peer"],
                    remedy="exchange the split sizes before the all-to-all, or print them",
                )
    return None
