"""Rules about point-to-point calls and splits, which collectives' sequence numbers do not cover.

A send is done when its peer has posted the receive, and the other way round: what two ranks post
first between them has to fit together.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shakedown.diagnosis.analyze.model import Cause, Edge, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.rules_stacks import OUTSIDE, places_of
from shakedown.diagnosis.analyze.situation import WAITING, Situation
from shakedown.diagnosis.records import FlightRecord, Frame, Operation, SourceRef

# `nccl:send 0->1`, `nccl:recv 1<-0`: ranks within the group, the own one first.
_CALL = re.compile(r"(?:^|:)(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")
_ALL_TO_ALL = re.compile(r"all_?to_?all")
_SENDS = frozenset({"send", "isend", "send_object_list"})
_RECEIVES = frozenset({"recv", "irecv", "recv_object_list"})


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


def posts_of(s: Situation, rank: int) -> dict[int, list[Post]]:
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


def _post(s: Situation, rank: int, record: FlightRecord, op: Operation) -> Post | None:
    match = _CALL.search(op.name)
    status = record.groups.get(op.group)
    members = (status.members if status else ()) or tuple(sorted(s.expected_ranks))
    # The group's member list turns its numbers into ranks of the job.
    if match is None or max(int(match[2]), int(match[3])) >= len(members):
        return None
    return Post(rank, members[int(match[3])], match[1] == "send", op)


def point_to_point(s: Situation) -> Hypothesis | None:
    """Neighbours whose first sends and receives do not fit."""
    posts = {rank: posts_of(s, rank) for rank in s.ranks}
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
    return Hypothesis(
        "pipeline_order",
        f"rank {a.rank} is first to {a} and rank {b.rank} is first to {b}: each waits for the "
        f"other's {'receive' if a.sends else 'send'}"
        + (f"; only {name_ranks(odd)} departs from its earlier steps" if odd else ""),
        ranks=odd,
        victims=sorted(set(s.ranks) - set(odd)),
        confidence=0.85 if odd else 0.75,
        evidence=_dumps(s, (a.rank, b.rank)),
        edges=_both(a, b),
        needed=[] if odd else ["the order in which the schedule means both ranks to post"],
        remedy="post both in one batch (batch_isend_irecv), or let one side receive first",
    )


def _shapes(s: Situation, a: Post, b: Post) -> Hypothesis:
    odd = _odd_one(s, a, b)
    sender, receiver = (a, b) if a.sends else (b, a)
    return Hypothesis(
        "pipeline_shape_mismatch",
        f"rank {sender.rank} sends {_text(sender.sizes)} and rank {receiver.rank} receives "
        f"{_text(receiver.sizes)}",
        ranks=odd,
        victims=sorted(set(s.ranks) - set(odd)),
        confidence=0.85 if odd else 0.7,
        evidence=_dumps(s, (a.rank, b.rank)),
        edges=_both(a, b),
        needed=[] if odd else ["the shapes that each stage sends and expects"],
        remedy="compare the output shape of the sending stage with its neighbour's input",
    )


def _text(sizes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(list(shape)) for shape in sizes[:4])


def _both(a: Post, b: Post) -> list[Edge]:
    return [
        Edge(f"rank {x.rank}", f"rank {y.rank}", f"{x}, not posted there")
        for x, y in ((a, b), (b, a))
    ]


class FinishedCalls:
    """How many sends and receives each rank is through with, by peer."""

    def __init__(self, s: Situation) -> None:
        self._situation = s
        self._ranks: dict[int, Counter[tuple[int, bool]]] = {}

    def by_peer(self, post: Post) -> bool:
        """The peer is through with its side of a call that is still open here.

        A batch ends as a whole: a part of it that has met its other half stays open with the rest.
        """
        mine = self._of(post.rank)[post.peer, post.sends]
        return self._of(post.peer)[post.rank, not post.sends] > mine

    def _of(self, rank: int) -> Counter[tuple[int, bool]]:
        if rank not in self._ranks:
            component = self._situation.ranks.get(rank)
            record = component.record if component else None
            calls = [op for op in record.operations if op.p2p and op.done] if record else []
            self._ranks[rank] = Counter(
                (post.peer, post.sends)
                for op in calls
                if record and (post := _post(self._situation, rank, record, op))
            )
        return self._ranks[rank]


_SILENT: tuple[Cause, tuple[str, str]] = ("missing_rank", ("", ""))  # no stack tells more


def not_posted(s: Situation) -> Hypothesis | None:
    """A peer that has posted nothing and waits for nobody itself."""
    posts = {rank: posts_of(s, rank) for rank in s.ranks}
    done = FinishedCalls(s)
    waits = [
        post
        for rank, by_peer in posts.items()
        for peer, row in by_peer.items()
        for post in row[:1]
        if rank not in posts.get(peer, {}) and not done.by_peer(post)
    ]
    awaited = {w.peer for w in waits} | s.waits.awaited
    waiters = {w.rank for w in waits} | s.waits.waiters
    late = sorted((awaited - waiters) & {w.peer for w in waits})
    involved = awaited | waiters
    spoke = [r for r in late if r in s.ranks and not s.has_no_evidence(r)]
    # Nothing tells what a rank without evidence has posted.
    if not late or spoke != late or 2 * len(late) > len(involved):
        return None
    # A rank that waits in another call is a victim itself.
    if any(s.positions[r].kind in WAITING for r in late):
        return None
    first = next(w for w in waits if w.peer == late[0])
    position = s.positions[late[0]]
    cause, says = OUTSIDE[position.kind][:2] if position.kind in OUTSIDE else _SILENT
    why = f": it {says[0]} ({position.where})" if says[0] and len(late) == 1 else ""
    return Hypothesis(
        cause,
        f"{name_ranks(late)} {verb(late, 'has', 'have')} not posted what rank {first.rank} waits "
        f"for ({first}){why}",
        ranks=late,
        victims=sorted(s.expected_ranks - set(late)),
        confidence=0.8,
        evidence=_dumps(s, [*late, first.rank]),
        edges=[Edge(f"rank {w.rank}", f"rank {w.peer}", f"{w}, not posted") for w in waits[:200]],
        needed=[f"a stack of {name_ranks(late)} (py-spy dump)"],
        remedy="see what the missing rank does: its stack, its log, its GPU's error counters",
    )


def _dumps(s: Situation, ranks: Sequence[int]) -> list[SourceRef]:
    places = [c.record.place for r in ranks[:8] if (c := s.ranks[r]).record]
    return [*places, *places_of(s, list(ranks)[:4])]


def one_way(s: Situation) -> Hypothesis | None:
    """From stacks: every rank sends, or every rank receives, so nobody takes the other part."""
    ranks = s.at("p2p")
    if len(ranks) < 2 or set(ranks) != s.expected_ranks:
        return None
    calls = {s.positions[r].op for r in ranks}
    if not calls <= _SENDS and not calls <= _RECEIVES:
        return None
    what = "send" if calls <= _SENDS else "receive"
    return Hypothesis(
        "pipeline_order",
        f"all {len(ranks)} ranks {what} ({s.positions[ranks[0]].where}) and nobody takes the "
        "other part",
        victims=ranks,
        confidence=0.7,
        evidence=places_of(s, ranks),
        needed=["the order in which the schedule means the ranks to send and receive"],
        remedy="post both in one batch (batch_isend_irecv), or let every second rank receive first",
    )


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
                return Hypothesis(
                    "size_mismatch",
                    f"in {known[0].name.split(':')[-1]} (number {seq} of {group.label}) the ranks "
                    f"send {sent} elements and receive {received}",
                    victims=sorted(group.members),
                    pattern="B",
                    confidence=0.75,
                    evidence=_dumps(s, sorted(group.views)),
                    needed=["the split sizes that each rank computed, by peer"],
                    remedy="exchange the split sizes before the all-to-all, or print them",
                )
    return None


# py-spy shortens Megatron's paths to `core/...`.
_WAITS = re.compile(r"torch/distributed/|(?:^|/)core/pipeline_parallel/")
SCHEDULE = re.compile(r"torch/distributed/pipelining/|(?:^|/)core/pipeline_parallel/")
# Megatron's 1F1B sends a gradient without receiving the next input after its last forward alone.
_LAST_CALL = "send_backward"


def in_schedule(path: Sequence[Frame]) -> bool:
    return any(SCHEDULE.search(f.file) for f in path)


def _runs_no_more(path: Sequence[Frame]) -> bool:
    """The rank has begun its step's last micro-batch."""
    last_call = any(f.function == _LAST_CALL for f in path)
    return bool(path) and (last_call or not in_schedule(path))


# `mesh_pp` of a device mesh, `PIPELINE_MODEL_PARALLEL_GROUP` of Megatron.
_PIPELINE_GROUP = re.compile(r"(?:^|_)(?:pp?|pipe\w*|pipeline\w*)(?:_|\b| )", re.I)


def pipeline_peers(s: Situation, rank: int) -> set[int]:
    """The other ranks of a rank's pipeline, by the process groups of the dumps."""
    groups = [g for g in s.facts.groups if rank in g.members]
    found = [set(g.members) for g in groups if _PIPELINE_GROUP.search(g.description)]
    return set().union(*found) - {rank}


def fewer_micro_batches(s: Situation) -> Hypothesis | None:
    """A rank has run its last micro-batch, and fewer than others, one of which waits for more.

    Of one that has left its schedule only the stages behind it starve, which have begun no more
    than it did, and those before it wait for gradients when they have begun all: stages count as
    the ranks of a pipeline do.
    """
    beats = {r: c.beat.beat for r, c in s.ranks.items() if c.beat and c.beat.beat.phase == "train"}
    # Numbers of micro-batches can be compared within one step alone.
    if len(beats) < len(s.ranks) or len({b.step for b in beats.values()}) != 1:
        return None
    most = max(b.micro_batch for b in beats.values())
    ended = [r for r in beats if _runs_no_more(s.positions[r].path)]
    short = [r for r in ended if beats[r].micro_batch < most]
    if not short or 2 * len(short) > len(beats):
        return None
    count = max(beats[r].micro_batch for r in short)
    left = any(not in_schedule(s.positions[r].path) for r in short)
    near = set().union(*(pipeline_peers(s, r) for r in short)) or set(beats)
    waiting = [
        r
        for r, b in beats.items()
        if r not in short
        and r in near
        and in_schedule(path := s.positions[r].path)
        and _WAITS.search(path[-1].file)
        and (not left or b.micro_batch <= count or (b.micro_batch == most and r < max(short)))
    ]
    if not waiting:
        return None
    return Hypothesis(
        "pipeline_order",
        f"{name_ranks(short)} {verb(short, 'is', 'are')} through the pipeline's schedule after "
        f"{count + 1} micro-batches of step {beats[short[0]].step}, of which others run "
        f"{most + 1}; {name_ranks(waiting)} {verb(waiting, 'waits', 'wait')} for the next one in "
        f"{s.positions[waiting[0]].path[-1]}",
        ranks=short,
        victims=sorted(set(s.ranks) - set(short)),
        confidence=0.85,
        evidence=[
            *[b.place for r in [*short, *waiting][:4] if (b := s.ranks[r].beat)],
            *places_of(s, [*short, *waiting]),
        ],
        edges=[
            Edge(f"rank {a}", f"rank {b}", "a micro-batch not sent") for a in waiting for b in short
        ][:200],
        remedy="give all stages of a pipeline the same number of micro-batches",
    )
