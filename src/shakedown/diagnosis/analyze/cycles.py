"""Question 5: do ranks wait for each other?

Kernels of one process run in the order in which they were launched once the device has no room
for both: a rank that launched the other group's first holds up those that wait for it.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, islice

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.classes import waiting_threads
from shakedown.diagnosis.analyze.differ import describe
from shakedown.diagnosis.analyze.graph import Block, WaitGraph
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.position import judge_path
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.groups import GroupFacts
from shakedown.diagnosis.records import Operation


def crossed_order(s: Situation) -> Hypothesis | None:
    """All ranks wait in groups whose members no dump lists (gloo), one of them alone in its own.

    A call in a group of one is done at once: the lone rank waits for others, who all wait in the
    other group, which for want of any other rank waits for it.
    """
    calls = {r: op for r in s.ranks if (op := _first_open(s, r)) is not None}
    # Every rank has to be seen waiting: one elsewhere would explain the wait by itself.
    if len(calls) < 2 or set(calls) != s.expected_ranks or len(_kinds(s, calls)) > 1:
        return None
    waiting: dict[str, list[int]] = {}
    for rank, op in calls.items():
        waiting.setdefault(op.group, []).append(rank)
    if len(waiting) != 2 or len({op.seq for op in calls.values()}) > 1:
        return None
    few, many = sorted(waiting.values(), key=lambda ranks: (len(ranks), ranks))
    if len(few) > 1:
        return None  # two groups that have nothing to do with each other look like that
    # Of two ranks neither is named, as each is alone in its group; and what the ranks' own
    # histories say must not name anybody else.
    named = few if len(many) > 1 and s.departing(calls) in ([], few) else []
    return conclude(
        s,
        "cross_group_cycle",
        f"rank {few[0]} waits in {_told(calls[few[0]])}, while {name_ranks(many)} "
        f"{verb(many, 'waits', 'wait')} in {_told(calls[many[0]])}: each group waits for ranks "
        "that wait in the other",
        ranks=named,
        sure="likely",
        evidence=s.recorded_at([*few, *many]),
        needed=["the order in which the code is meant to use these groups"],
        waits=[Block(few, many, _owed(calls[few[0]])), Block(many, few, _owed(calls[many[0]]))],
    )


def _kinds(s: Situation, calls: Mapping[int, Operation]) -> set[tuple[object, ...]]:
    """Groups of other kinds (data, pipeline) have other members, and calls of their own."""
    kinds: set[tuple[object, ...]] = set()
    for rank, op in calls.items():
        record = s.ranks[rank].record
        label = record.groups[op.group].description if record else ""
        kinds.add((label, op.name, op.sizes, op.dtypes))
    return kinds


def _first_open(s: Situation, rank: int) -> Operation | None:
    """The first collective that is not done, where it is on a group without a list of members."""
    record = s.ranks[rank].record
    open_calls = [op for op in record.operations if not op.done] if record else []
    first = min(open_calls, key=lambda op: op.order, default=None)
    if record is None or first is None or first.p2p:
        return None
    status = record.groups.get(first.group)
    unlisted = status is not None and not status.members and status.description != "default_pg"
    return first if unlisted else None


def _owed(op: Operation) -> str:
    return f"entered {_told(op)}"


def _told(op: Operation) -> str:
    return f"{describe(op)} (number {op.seq} of group {op.group})"


def crossed(s: Situation) -> Hypothesis | None:
    """Ranks wait for each other in different groups."""
    ranks = [node for node in s.graph.cycle if isinstance(node, int)]
    if not ranks or s.graph.roots:
        return None
    told = "; ".join(f"rank {r} in {s.waits_in([r])}" for r in ranks[:4])
    return conclude(
        s,
        "cross_group_cycle",
        f"{name_ranks(ranks)} wait for each other in different groups: {told}",
        sure="likely",
        evidence=s.recorded_at(ranks),
        needed=["the order in which the code is meant to use these groups"],
    )


_PAIRS = 2000  # pairs of groups that are compared: large jobs have thousands of groups
_BACK = 4  # earlier pairs of calls that tell a rank's own order


def opposite_order(s: Situation) -> Hypothesis | None:
    """All members wait in the same calls of two groups, which some entered the other way round."""
    # A rank that is behind, or a call that differs, explains the wait without any order.
    if s.calls or s.divergences:
        return None
    waiting = [g for g in s.facts.groups if len(g.views) > 1 and _open_call(g) is not None]
    for first, second in islice(combinations(waiting, 2), _PAIRS):
        shared = sorted(first.views.keys() & second.views.keys())
        signs = {r: _sign(first, second, r, 0) for r in shared}
        one = [r for r in shared if signs[r] > 0]
        other = [r for r in shared if signs[r] < 0]
        if one and other:
            return _opposite(s, (first, second), signs)
    return _circle(s, waiting)


def _circle(s: Situation, waiting: Sequence[GroupFacts]) -> Hypothesis | None:
    """Each rank's first call that is not done waits for ranks whose own first one is another's."""
    first: dict[int, tuple[int, GroupFacts]] = {}
    for group in waiting:
        for rank, view in group.views.items():
            op = view.operations.get(view.pending or 0)
            if op is not None:
                first[rank] = min(first.get(rank, (op.order, group)), (op.order, group), key=_order)
    blocks = [
        Block([rank], awaited, f"ended its first call before that of {group.label}")
        for rank, (_, group) in sorted(first.items())
        if (awaited := [m for m in group.members if m in first and first[m][1] is not group])
    ]
    graph = WaitGraph(blocks)
    ranks = [node for node in graph.cycle if isinstance(node, int)]
    if not ranks or graph.roots:
        return None
    told = "; ".join(f"rank {r} in that of {first[r][1].label}" for r in ranks[:4])
    return conclude(
        s,
        "cross_group_cycle",
        f"{name_ranks(ranks)} have entered the calls of several groups in different orders, and "
        f"wait in the first of them for each other: {told}",
        sure="open",
        evidence=s.recorded_at(ranks),
        needed=["the order in which the code is meant to use these groups"],
        waits=blocks,
    )


def _order(row: tuple[int, GroupFacts]) -> int:
    return row[0]


def _open_call(group: GroupFacts) -> int | None:
    """The call that all members of a dump are in, and none is through with."""
    calls = {view.pending for view in group.views.values()}
    return next(iter(calls)) if len(calls) == 1 else None


def _sign(first: GroupFacts, second: GroupFacts, rank: int, back: int) -> int:
    """1: `first` was entered before `second`; -1: after it; 0: not known. `back` calls ago."""
    a, b = (
        view.operations.get((view.pending or 0) - back)
        for view in (first.views[rank], second.views[rank])
    )
    if a is None or b is None:
        return 0
    # `order` numbers all calls of a rank, whatever their group.
    return 1 if a.order < b.order else -1


def _departs(groups: tuple[GroupFacts, GroupFacts], rank: int, now: int) -> bool | None:
    """Whether a rank left the order that it kept in the calls before; None where none tells."""
    earlier = {sign for back in range(1, _BACK + 1) if (sign := _sign(*groups, rank, back))}
    return None if len(earlier) != 1 else now not in earlier


def _opposite(
    s: Situation, groups: tuple[GroupFacts, GroupFacts], signs: Mapping[int, int]
) -> Hypothesis:
    one, other = ([r for r in signs if signs[r] == sign] for sign in (1, -1))
    left = {r: _departs(groups, r, signs[r]) for r in (*one, *other)}
    departing = [r for r in sorted(left) if left[r]]
    sure = None not in left.values() and 0 < 2 * len(departing) <= len(left)
    named = departing if sure and departing in (one, other) else []
    labels = [f"{g.label} (number {_open_call(g)})" for g in groups]
    records = [c.record for r in (*one[:3], *other[:3]) if (c := s.ranks[r])]
    return conclude(
        s,
        "cross_group_cycle",
        f"{name_ranks(one)} {verb(one, 'has', 'have')} entered {labels[0]} before {labels[1]}, "
        f"{name_ranks(other)} the other way round: each waits for the other's first call",
        ranks=named,
        sure="likely" if named else "open",
        evidence=[record.place for record in records if record],
        needed=[] if named else ["the order in which the code is meant to use these groups"],
        waits=[Block(one, other, f"ended {labels[0]}"), Block(other, one, f"ended {labels[1]}")],
    )


def two_threads(s: Situation) -> Hypothesis | None:
    """Two threads of one process inside collectives: their order differs between ranks."""
    ranks = [r for r in s.alive if _threads_inside(s, r) > 1 and not _own_groups(s, r)]
    if not ranks:
        return None
    return conclude(
        s,
        "two_threads_one_group",
        f"{name_ranks(ranks)} {verb(ranks, 'waits', 'wait')} in collectives from two "
        "threads at once",
        # Nobody is named: stacks do not show whose order is wrong.
        sure="open",
        evidence=s.seen_at(ranks),
        needed=["Flight Recorder dumps, for the order of the two threads' calls on each rank"],
    )


def _own_groups(s: Situation, rank: int) -> bool:
    """The open calls of the dump are on one group each: every thread has its own."""
    record = s.ranks[rank].record
    groups = [op.group for op in record.operations if not op.done] if record else []
    return len(groups) > 1 and len(set(groups)) == len(groups)


def _threads_inside(s: Situation, rank: int) -> int:
    stack = s.ranks[rank].stack
    path = stack.main.frames if stack and stack.main else ()
    # Two main threads: the text is of several processes, which nothing tells apart.
    if stack and sum(t.frames[0].function == "<module>" for t in stack.threads if t.frames) > 1:
        return 0
    # In a backward pass the main thread only waits for those that run it.
    backward = path and path[-1].function in ("_engine_run_backward", "run_backward", "backward")
    main = judge_path(path).kind in ("collective", "p2p") and not backward
    return main + len(waiting_threads(s.ranks[rank]))


_SENDS = frozenset({"send", "isend", "send_object_list"})
_RECEIVES = frozenset({"recv", "irecv", "recv_object_list"})


def one_way(s: Situation) -> Hypothesis | None:
    """From stacks: every rank sends, or every rank receives, so nobody takes the other part."""
    ranks = s.at("p2p")
    if len(ranks) < 2 or set(ranks) != s.expected_ranks:
        return None
    calls = {s.positions[r].op for r in ranks}
    if not calls <= _SENDS and not calls <= _RECEIVES:
        return None
    what = "send" if calls <= _SENDS else "receive"
    return conclude(
        s,
        "pipeline_order",
        f"all {len(ranks)} ranks {what} ({s.positions[ranks[0]].where}) and nobody takes the "
        "other part",
        sure="likely",
        evidence=s.seen_at(ranks),
        needed=["the order in which the schedule means the ranks to send and receive"],
        remedy="post both in one batch (batch_isend_irecv), or let every second rank receive first",
    )
