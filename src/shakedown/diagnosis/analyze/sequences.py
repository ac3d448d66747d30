"""The first position at which the calls of a group's ranks part.

Collectives of a group have numbers, and the messages between two ranks pair off in their order. All
rules about calls that differ ask here.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.pattern import token
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.groups import GroupFacts, GroupView
from shakedown.diagnosis.records import FlightRecord, Operation


@dataclass(frozen=True)
class Parting:
    """The first number of a group at which its ranks made different calls."""

    group: GroupFacts
    seq: int
    calls: Mapping[int, Operation]

    @property
    def holds(self) -> bool:
        """Whether other operations were called, and not all of what was called is done."""
        views = self.group.views.values()
        return _unlike(list(self.calls.values())) and any(view.pending for view in views)


def find_partings(groups: Sequence[GroupFacts]) -> list[Parting]:
    """Where ranks of a group disagree to the end of their dumps, hardest evidence first."""
    found = [_parting(group, frames=False) for group in groups]
    # Other code lines come second: ranks may reach one call from different lines by design.
    found += [_parting(group, frames=True) for group in groups]
    # Last: the watchdog's lines tell one call of each rank, and not of all the same one.
    found += [_open_unlike(group) for group in groups]
    return [row for row in found if row is not None]


def _parting(group: GroupFacts, *, frames: bool) -> Parting | None:
    views = list(group.views.values())
    if len(views) < 2:
        return None
    common = sorted(set.intersection(*(set(view.operations) for view in views)))

    def unlike(at: int) -> bool:
        return _unlike([view.operations[common[at]] for view in views], frames=frames)

    # Calls that differed before ranks agreed again hold nobody, but for those that are still open:
    # on GPUs hosts go on to enqueue calls, alike and unlike, behind the one that holds them.
    ends = {len(common) - 1} | (set() if frames else {_first_open(views, common, unlike)})
    starts = [_begin(at, unlike) for at in ends if at >= 0 and unlike(at)]
    if not starts:
        return None
    start = min(starts)
    calls = {rank: view.operations[common[start]] for rank, view in group.views.items()}
    # What completed everywhere holds nobody.
    done = start == len(common) - 1 and all(op.done for op in calls.values())
    return None if done else Parting(group, common[start], calls)


def _first_open(
    views: Sequence[GroupView], common: Sequence[int], unlike: Callable[[int], bool]
) -> int:
    """The place of the first calls that differ and are not done; -1 where none are.

    A call that differs and yet is done was counted differently, and holds nobody.
    """
    lowest = min((view.pending for view in views if view.pending), default=None)
    later = [] if lowest is None else [at for at, seq in enumerate(common) if seq >= lowest]
    still = (at for at in later if not all(view.operations[common[at]].done for view in views))
    return next((at for at in still if unlike(at)), -1)


def _begin(at: int, unlike: Callable[[int], bool]) -> int:
    """The first place of the run of calls that differ which ends `at`.

    It can be done nevertheless, as with few elements on NCCL.
    """
    while at and unlike(at - 1):
        at -= 1
    return at


def done_unlike(groups: Sequence[GroupFacts]) -> Parting | None:
    """The newest call that all members made and are through with, where it differs between them."""
    for group in groups:
        newest = {max(view.operations, default=0) for view in group.views.values()}
        seq = newest.pop()
        if newest or not seq or len(group.views) < 2:
            continue
        calls = {rank: view.operations[seq] for rank, view in group.views.items()}
        if all(op.done for op in calls.values()) and _unlike(list(calls.values())):
            return Parting(group, seq, calls)
    return None


def _open_unlike(group: GroupFacts) -> Parting | None:
    """Ranks that wait in calls of one number, which differ; others may have none recorded."""
    waiting: dict[int, dict[int, Operation]] = defaultdict(dict)
    for rank, view in group.views.items():
        op = view.operations.get(view.pending or 0)
        if op is not None and view.pending:
            waiting[op.seq][rank] = op
    for seq, calls in sorted(waiting.items()):
        if len(calls) > 1 and _unlike(list(calls.values())):
            return Parting(group, seq, calls)
    return None


# Operations whose sizes differ between ranks by design.
# Not reduce_scatter and all_gather, whose sizes are the same on every rank.
_UNEVEN = re.compile(r"all_?to_?all|(?<!reduce_)scatter|(?<!all)(?<!all_)gather")


def _unlike(calls: Sequence[Operation], *, frames: bool = False) -> bool:
    """Whether they cannot be one call; with `frames` also those from different lines."""
    frames = frames and all(op.frames for op in calls)  # the JSON form has none
    keys = set()
    for op in calls:
        _, name, _, _, dtypes, p2p, where = token(op, frames=frames)
        uneven = _UNEVEN.search(op.name) is not None
        keys.add((name, _even_sizes(op), () if uneven else dtypes, p2p, where))
    return len(keys) > 1 or len({known for op in calls if (known := known_dtypes(op))}) > 1


def _even_sizes(op: Operation) -> tuple[object, ...]:
    """The sizes that are the same on all ranks: only the root of a gather has results."""
    found = _UNEVEN.search(op.name)
    if found is None:
        return op.sizes, op.output_sizes
    if "(" in op.name:  # several calls in one
        return ()
    return {"gather": op.sizes, "scatter": op.output_sizes}.get(found[0], ())


def known_dtypes(op: Operation) -> frozenset[str]:
    """Without those of tensors that a rank leaves out: all but the root of a gather or scatter."""
    return frozenset(op.dtypes).difference(("Undefined",))


def first_open(record: FlightRecord | None) -> Operation | None:
    """The first call of a rank that is not done, whatever its group."""
    undone = [op for op in record.operations if not op.done] if record else []
    return min(undone, key=_order, default=None)


def _order(op: Operation) -> int:
    return op.order


# `nccl:send 0->1`, `nccl:recv 1<-0`: ranks within the group, the own one first.
_MESSAGE = re.compile(r"(?:^|:)(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")


@dataclass(frozen=True)
class Post:
    """A point-to-point call: `rank` sends to `peer`, or receives from it."""

    rank: int
    peer: int
    sends: bool
    operation: Operation

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        return self.operation.sizes if self.sends else self.operation.output_sizes

    def __str__(self) -> str:
        return f"{'send to' if self.sends else 'receive from'} rank {self.peer}"


class Messages:
    """Sends and receives by rank and peer, which the numbers of collectives do not cover.

    A send is done when its peer has posted the receive, and the other way round: what two ranks
    post first between them has to fit together. `ahead`: each rank's first calls that are not done.
    """

    def __init__(self, ranks: Mapping[int, ComponentFacts], world: tuple[int, ...]) -> None:
        self.ahead: dict[tuple[int, int], list[Post]] = defaultdict(list)
        self._done: dict[tuple[int, int, bool], list[Post]] = defaultdict(list)
        for rank, component in ranks.items():
            record = component.record
            calls = [op for op in record.operations if op.p2p] if record else []
            for op in sorted(calls, key=_order):
                if record and (post := _post(rank, record, op, world)):
                    self._take(post)

    def _take(self, post: Post) -> None:
        op = post.operation
        if op.done:
            self._done[post.rank, post.peer, post.sends].append(post)
            return
        batch = self.ahead[post.rank, post.peer]
        first = batch[0].operation if batch else op
        # Calls of one batch share a number, and none of them waits for the one before.
        if (op.group, op.seq) == (first.group, first.seq):
            batch.append(post)

    def answer(self, post: Post) -> Post | None:
        """The peer's side of a call that is still open here, where the peer is through with it.

        A batch ends as a whole: a part of it that has met its other half stays open with the rest.
        """
        mine = self._done.get((post.rank, post.peer, post.sends), ())
        theirs = self._done.get((post.peer, post.rank, not post.sends), ())
        return theirs[len(mine)] if len(theirs) > len(mine) else None

    def unanswered(self) -> Iterator[Post]:
        """First calls whose peer has neither ended nor posted anything between the two."""
        for (rank, peer), batch in self.ahead.items():
            if (peer, rank) not in self.ahead and not self.answer(batch[0]):
                yield batch[0]

    def misfits(self) -> Iterator[tuple[Post, Post]]:
        """Pairs of calls at which two ranks part: both send, both receive, or the sizes differ."""
        posts = [post for batch in self.ahead.values() for post in batch]
        # A sender is through with what it sent, also where the receiver expects more.
        yield from ((a, b) for a in posts if (b := self.answer(a)) and _sizes_differ(a, b))
        for (rank, peer), mine in self.ahead.items():
            theirs = self.ahead.get((peer, rank), ()) if rank < peer else ()
            fitting = [(a, b) for a in mine for b in theirs if a.sends != b.sends]
            if theirs and not fitting:
                yield mine[0], theirs[0]
            yield from ((a, b) for a, b in fitting if _sizes_differ(a, b))


def _sizes_differ(a: Post, b: Post) -> bool:
    return a.sizes != b.sizes and bool(a.sizes and b.sizes)


def _post(rank: int, record: FlightRecord, op: Operation, world: tuple[int, ...]) -> Post | None:
    match = _MESSAGE.search(op.name)
    status = record.groups.get(op.group)
    members = (status.members if status else ()) or world
    # The group's member list turns its numbers into ranks of the job.
    if match is None or max(int(match[2]), int(match[3])) >= len(members):
        return None
    return Post(rank, members[int(match[3])], match[1] == "send", op)
