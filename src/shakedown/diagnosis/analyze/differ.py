"""Questions 3 and 5 of calls: where they part, why, and who left the order of its own history."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.cleanup import left_the_loop
from shakedown.diagnosis.analyze.graph import Block, WaitGraph
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.sequences import Parting, done_unlike, first_open, known_dtypes
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import Operation
from shakedown.stacks.frames import user_frames


def parted(s: Situation) -> Hypothesis | None:
    """Pattern B: at one number of a group the ranks made different calls.

    A second source tells more of why than the calls themselves: the thread that called, or the
    heartbeats. gloo does not wait where calls do not fit: it aborts who receives more than it
    expects, a victim as often as not.
    """
    readings = (_by_thread, _by_beats, _by_history)
    told = next((h for read in readings for row in s.partings if (h := read(s, row))), None)
    aborts = [e.place for c in s.ranks.values() for e in c.events if e.kind == "size_mismatch"]
    return replace(told, evidence=[*aborts[:1], *told.evidence]) if told else None


def _by_history(s: Situation, row: Parting) -> Hypothesis:
    departing = s.departing(row.calls)
    # Where most ranks depart, the others may be those that skipped a call. Of half of them nothing
    # is known either where the dump does not even say who is in the group (format 1).
    listed = not row.group.description.startswith("pg_id ")
    minority = departing if 2 * len(departing) < len(row.calls) + listed else []
    cause = _kind(s, row, minority)
    half = len(row.calls) == 2
    by_call = _by_call(row)
    keeping = sorted(set(row.calls) - set(departing)) or sorted(row.calls)
    return conclude(
        s,
        cause,
        _sentence(row, minority, keeping, dtype=cause == "dtype_mismatch"),
        ranks=minority,
        # Half the ranks on the branch could also mean that the other half skipped it.
        sure="told" if minority and (2 * len(minority) < len(row.calls) or half) else "open",
        evidence=s.recorded_at([*minority, *keeping]),
        waits=[
            Block(ranks, others, f"entered {call}, number {row.seq}")
            for call, ranks in by_call.items()
            for others in by_call.values()
            if others is not ranks
        ],
        needed=[]
        if minority
        else ["which branch is meant to be taken: the history of the ranks does not tell"],
    )


def parted_before(s: Situation) -> Hypothesis | None:
    """Calls that differ and are yet done on all ranks: nothing hangs in them."""
    row = done_unlike(s.facts.groups)
    if row is None or s.graph or s.waiting:
        return None
    cause = _kind(s, row, ())
    told = _sentence(row, [], [], dtype=cause == "dtype_mismatch")
    return conclude(
        s,
        cause,
        f"{told}; all are through with it, and hold other results than they should",
        sure="open",
        evidence=s.recorded_at(sorted(row.calls)),
        needed=["what the job did next: its logs and stacks"],
        state="unknown",
    )


def _kind(s: Situation, row: Parting, named: Collection[int]) -> Cause:
    left, stay = left_the_loop(s)
    if named and stay and set(named) <= set(left):
        return "exception_in_cleanup"  # what they called there is no branch of the loop
    calls = list(row.calls.values())
    if len({op.name for op in calls}) == 1:
        if len({known for op in calls if (known := known_dtypes(op))}) > 1:
            return "dtype_mismatch"
        unplaced = not any(op.frames for op in calls)  # logs and JSON: no branch is seen
        if len({(op.sizes, op.output_sizes) for op in calls}) > 1 and (
            unplaced or _same_place(calls)
        ):
            return "size_mismatch"
    elif _same_place(calls):
        return "collective_mismatch"
    return "conditional_collective" if named else "collective_mismatch"


def _same_place(calls: Sequence[Operation]) -> bool:
    """Every function that the ranks' paths share stands at one line: no branch led to the calls.

    A wrapper around the call, on some ranks alone, is no other place.
    """
    lines: dict[tuple[str, str], set[int]] = {}
    shared: list[set[tuple[str, str]]] = []
    for op in calls:
        users = user_frames(op.frames)
        for frame in users:
            lines.setdefault((frame.file, frame.function), set()).add(frame.line)
        shared.append({(frame.file, frame.function) for frame in users})
    common = set.intersection(*shared)
    return bool(common) and all(len(lines[key]) == 1 for key in lines)


def _by_call(row: Parting, *, dtype: bool = False) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for rank, op in row.calls.items():
        kinds.setdefault(describe(op, dtype=dtype), []).append(rank)
    return kinds


def _sentence(row: Parting, departing: list[int], keeping: list[int], *, dtype: bool) -> str:
    at = f"collective {row.seq} of {row.group.label}"
    if departing:
        mine, others = (describe(row.calls[r[0]], dtype=dtype) for r in (departing, keeping))
        return (
            f"{name_ranks(departing)} called {mine} as {at}, where {name_ranks(keeping)} called "
            f"{others}: only {name_ranks(departing)} {verb(departing, 'departs', 'depart')} from "
            "the calls of earlier steps"
        )
    kinds = _by_call(row, dtype=dtype)
    told = "; ".join(f"{name_ranks(ranks)} {call}" for call, ranks in kinds.items())
    return f"ranks made different calls as {at}: {told}"


def describe(op: Operation, *, dtype: bool = False) -> str:
    """`broadcast of [2] float at log_metrics (hang.py:30)`; `dtype` where that is what differs."""
    name = op.name.split(":", 1)[-1]
    sizes = f" of {list(op.sizes[0])}" if op.sizes else ""
    types = f" {', '.join(sorted(known_dtypes(op)))}" if dtype else ""
    users = user_frames(op.frames)
    frame = users[-1] if users else None
    return f"{name}{sizes}{types}" + (f" at {frame}" if frame else "")


def _by_thread(s: Situation, row: Parting) -> Hypothesis | None:
    """Some of the calls came from a second thread of a process that calls from its first, too.

    A rank is named where it alone has a second thread: elsewhere their order is at fault.
    """
    called = sorted(r for r, op in row.calls.items() if _in_thread(op))
    views = row.group.views
    both = sorted(r for r in views if len({*map(_in_thread, _framed(row, r))}) > 1)
    others = sorted(set(row.calls) - set(called))
    if not (called and others and both):
        return None
    named = both if both == called and 2 * len(both) <= len(row.calls) else []
    return conclude(
        s,
        "two_threads_one_group",
        f"{name_ranks(called)} called {describe(row.calls[called[0]])} from a second thread as "
        f"collective {row.seq} of {row.group.label}, where {name_ranks(others)} called "
        f"{describe(row.calls[others[0]])}",
        ranks=named,
        sure="told" if named else "likely",
        evidence=s.recorded_at([*called, *others]),
        needed=[] if named else ["the order in which the threads are meant to call"],
    )


def _framed(row: Parting, rank: int) -> list[Operation]:
    return [op for op in row.group.views[rank].operations.values() if op.frames]


def _in_thread(op: Operation) -> bool:
    """Python started the thread; autograd's own threads have no such frame."""
    outer = op.frames[0] if op.frames else None
    return outer is not None and outer.function == "_bootstrap" and "threading" in outer.file


def _by_beats(s: Situation, row: Parting) -> Hypothesis | None:
    """Ranks that have gone on to the end without a batch of the step that the others train on."""
    beats = {r: b.beat for r in row.calls if r in s.ranks and (b := s.ranks[r].beat)}
    short = sorted(r for r, b in beats.items() if b.phase in BEYOND and not b.batch_size)
    training = sorted(r for r, b in beats.items() if b.phase == "train" and b.batch_size > 0)
    # A rank in a third phase (waiting for rollouts, say) would need another explanation.
    whole = len(training) + len(short) == len(row.calls)
    if not short or not whole or len({b.step for b in beats.values()}) > 1:
        return None
    # Both sources have to agree: the heartbeats' short ranks are those whose calls depart.
    if short != s.departing(row.calls) or 2 * len(short) > len(row.calls):
        return None
    first = beats[short[0]]
    places = [b.place for r in [*short, *training][:4] if (b := s.ranks[r].beat)]
    return conclude(
        s,
        "uneven_inputs",
        f"{name_ranks(short)} left the loop for its {first.phase} without a batch of step "
        f"{first.step}, on which {name_ranks(training)} {verb(training, 'trains', 'train')}; "
        f"{describe(row.calls[short[0]])} met {describe(row.calls[training[0]])}",
        ranks=short,
        sure="seen",
        evidence=[*places, *s.recorded_at([*short, *training])],
        waits=[Block(training, short, "come to this step: its batches have ended")],
    )


BEYOND = ("eval", "checkpoint", "finished")  # phases behind the loop


def messages_parted(s: Situation) -> Hypothesis | None:
    """Neighbours whose first sends and receives do not fit."""
    a, b = next(s.messages.misfits(), (None, None))
    if a is None or b is None:
        return None
    calls = {a.rank: a.operation, b.rank: b.operation}
    odd = s.departing(calls) if all(s.departure(r, op).known for r, op in calls.items()) else []
    odd = odd if len(odd) == 1 else []
    crossed = a.sends == b.sends
    sender, receiver = (a, b) if a.sends else (b, a)
    told = (
        f"rank {a.rank} is first to {a} and rank {b.rank} is first to {b}: each waits for the "
        f"other's {'receive' if a.sends else 'send'}"
        + (f"; only {name_ranks(odd)} departs from its earlier steps" if odd else "")
        if crossed
        else f"rank {sender.rank} sends {_shapes(sender.sizes)} and rank {receiver.rank} receives "
        f"{_shapes(receiver.sizes)}"
    )
    wanted = "the shapes that each stage sends and expects"
    wanted = "the order in which the schedule means both ranks to post" if crossed else wanted
    return conclude(
        s,
        "pipeline_order" if crossed else "pipeline_shape_mismatch",
        told,
        ranks=odd,
        sure="seen" if odd else "likely",
        evidence=s.recorded_at((a.rank, b.rank)),
        waits=[Block((x.rank,), (y.rank,), f"posted what fits ({x})") for x, y in ((a, b), (b, a))],
        needed=[] if odd else [wanted],
        remedy="post both in one batch (batch_isend_irecv), or let one side receive first"
        if crossed
        else "",
    )


def _shapes(sizes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(list(shape)) for shape in sizes[:4])


_ALL_TO_ALL = re.compile(r"all_?to_?all")


def splits_parted(s: Situation) -> Hypothesis | None:
    """An all-to-all in which all ranks together send more or fewer elements than they receive.

    Each rank's sizes may differ by design; whose are wrong the sums do not tell.
    """
    for group in s.facts.groups:
        for seq in sorted({v.pending for v in group.views.values() if v.pending}):
            found = [op for v in group.views.values() if (op := v.operations.get(seq))]
            known = [op for op in found if op.sizes and op.output_sizes]
            alike = all(_ALL_TO_ALL.search(op.name) for op in known)
            # The sums mean something only over all members.
            if len(known) < len(group.members) or not alike:
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


_DUMPS = "Flight Recorder dumps of all ranks, to tell which one left the usual order"


def timed_out_apart(s: Situation) -> Hypothesis | None:
    """Ranks timed out in different calls, of which no line names the group.

    Groups of a job have as many members each: ranks of several such wait for somebody else.
    """
    calls: dict[str, list[int]] = {}
    for rank in s.at("collective"):
        if not s.positions[rank].path:
            calls.setdefault(s.positions[rank].op, []).append(rank)
    sizes = {len(ranks) for ranks in calls.values()}
    if len(calls) < 2 or (len(sizes) == 1 and sizes != {1}) or s.graph:
        return None
    told = "; ".join(f"{name_ranks(row)} in {call}" for call, row in list(calls.items())[:4])
    # `allreduce 41 1024`: operation, number and elements
    parts = [call.split(" ") for call in calls]
    alike = all(len(row) == 3 and row[:2] == parts[0][:2] for row in parts)
    differ = len({row[0] for row in parts}) > 1 or len({row[1] for row in parts}) == 1
    cause: Cause = "size_mismatch" if alike else "collective_mismatch"
    return conclude(
        s,
        # One operation under several numbers: some ranks may only be behind.
        cause if differ else "unknown",
        f"ranks timed out in different calls: {told}",
        sure="open",
        evidence=s.seen_at(sorted(r for row in calls.values() for r in row)),
        needed=[f"{_DUMPS}, and of which group each call is"],
    )


_OF_SIZES = re.compile(r"\bsizes?\b|\bshapes?\b|\bhas \d+ params\b", re.I)


def told_mismatch(s: Situation) -> Hypothesis | None:
    """torch compared two ranks' calls itself (its DETAIL debug mode); neither is blamed."""
    events = [e for e in s.facts.all_events() if e.kind == "collective_mismatch"]
    if not events:
        return None
    # The two calls, where torch gives them; else only that ranks do not agree.
    detail = next((e.detail for e in events if "call_a" in e.detail), None)
    cause: Cause = "size_mismatch" if _OF_SIZES.search(events[0].text) else "collective_mismatch"
    says = f"the ranks do not agree: {events[0].text}"
    if detail is not None:
        first, second = str(detail.get("call_a", "")), str(detail.get("call_b", ""))
        cause = _differing(first, second)
        says = (
            f"rank {detail.get('rank_a')} and rank {detail.get('rank_b')} made different calls: "
            f"{_short(first)} against {_short(second)}"
        )
    return conclude(
        s,
        cause,
        says,
        sure="open" if detail is None else "likely",
        evidence=[e.place for e in events[:4]],
        needed=[_DUMPS],
    )


def _differing(first: str, second: str) -> Cause:
    """By what two calls differ in, as torch prints them."""
    operations, sizes, types = (
        first.partition(key)[2].split("]", 1)[0].split(",", 1)[0]
        != second.partition(key)[2].split("]", 1)[0].split(",", 1)[0]
        for key in ("OpType=", "TensorShape=", "TensorDtypes=")
    )
    # Where sizes and types both differ they are different calls of one operation.
    if operations or (sizes and types):
        return "collective_mismatch"
    return "dtype_mismatch" if types else "size_mismatch"


def _short(call: str) -> str:
    return call.split(", TensorDeviceTypes", 1)[0].replace("CollectiveFingerPrint(", "")


@dataclass(frozen=True)
class _Side:
    """Ranks whose first open call is one call of a group, and who may be in that group."""

    call: str
    ranks: list[int]
    members: Collection[int]


def crossed_groups(s: Situation) -> Hypothesis | None:
    """Ranks wait for each other in different groups, which they entered in different orders.

    Kernels of one process run in the order in which they were launched once the device has no room
    for both: a rank that launched the other group's first holds up those that wait for it.
    """
    # A rank that is behind, or a call that differs, explains the wait without any order.
    if s.graph.roots or (s.partings and not s.graph.cycle):
        return None
    calls = {r: op for r, c in s.ranks.items() if (op := first_open(c.record)) and not op.p2p}
    lone = _lone_side(s, calls)
    sides = lone or _sides(s, calls)
    inside = {rank for side in sides for rank in side.ranks}
    blocks = [
        Block(side.ranks, awaited, f"ended its first call before {side.call}")
        for side in sides
        if (awaited := sorted(inside.intersection(side.members).difference(side.ranks)))
    ]
    graph = WaitGraph([*s.graph.sources, *blocks])
    ranks = [node for node in graph.cycle if isinstance(node, int)]
    if not ranks or graph.roots:
        return None
    places = {side.call: side.ranks for side in sides}
    for rank in ranks if not sides else ():
        places.setdefault(s.waits_in([rank]), []).append(rank)
    told = "; ".join(f"{name_ranks(row)} in {call}" for call, row in list(places.items())[:4])
    named = _crossing(s, calls, sides, lone=bool(lone))
    return conclude(
        s,
        "cross_group_cycle",
        f"{name_ranks(ranks)} wait for each other in different groups: {told}"
        + (f"; {name_ranks(named)} crossed the order of the others" if named else ""),
        ranks=named,
        sure="likely" if named or lone or s.graph.cycle else "open",
        evidence=s.recorded_at(ranks),
        needed=["the order in which the code is meant to use these groups"],
        waits=blocks,
    )


def _sides(s: Situation, calls: Mapping[int, Operation]) -> list[_Side]:
    """Of groups of which all members are in one call, and none is through with it."""
    sides = []
    for group in s.facts.groups:
        ranks = [r for r, name in group.names.items() if r in calls and calls[r].group == name]
        if ranks and len(group.views) > 1 and len({v.pending for v in group.views.values()}) == 1:
            op = calls[ranks[0]]
            told = f"{describe(op)} (number {op.seq} of {group.label})"
            sides.append(_Side(told, ranks, group.members))
    return sides


def _lone_side(s: Situation, calls: Mapping[int, Operation]) -> list[_Side]:
    """Two groups whose members no dump lists (gloo), where one rank waits alone in one of them.

    A call in a group of one is done at once: the lone rank waits for others, who all wait in the
    other group, which for want of any other rank waits for it.
    """
    kinds: set[object] = set()
    waiting: dict[str, list[int]] = {}
    for rank, op in calls.items():
        record = s.ranks[rank].record
        status = record.groups.get(op.group) if record else None
        if status is None or status.members or status.description == "default_pg":
            return []
        # Groups of other kinds (data, pipeline) have other members, and calls of their own.
        kinds.add((status.description, op.name, op.sizes, op.dtypes, op.seq))
        waiting.setdefault(op.group, []).append(rank)
    # Two groups of several ranks each may have nothing to do with each other. And every rank has to
    # be seen waiting: one elsewhere would explain the wait by itself.
    alone = len(waiting) == 2 and min(map(len, waiting.values())) == 1 and len(kinds) == 1
    if not alone or set(calls) != s.expected_ranks:
        return []
    ops = {name: calls[ranks[0]] for name, ranks in waiting.items()}
    return [
        _Side(
            f"{describe(ops[name])} (number {ops[name].seq} of group {name})", ranks, calls.keys()
        )
        for name, ranks in waiting.items()
    ]


def _crossing(
    s: Situation, calls: Mapping[int, Operation], sides: Sequence[_Side], *, lone: bool
) -> list[int]:
    """The side of two that left the order of its own calls before; empty where not all tell."""
    if len(sides) != 2:
        return []
    few, many = sorted((side.ranks for side in sides), key=len)
    departing = s.departing({r: calls[r] for r in (*few, *many)})
    if lone:
        # Of two ranks neither is named, as each is alone in its group; and what the ranks' own
        # histories say must not name anybody else.
        return few if len(many) > 1 and departing in ([], few) else []
    known = all(s.departure(r, calls[r]).known for r in (*few, *many))
    one_side = departing in (sorted(few), sorted(many))
    return departing if known and one_side and 2 * len(departing) <= len(few) + len(many) else []
