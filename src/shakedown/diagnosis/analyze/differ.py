"""Question 3: do the ranks' calls differ? By dumps, watchdog lines, and torch's own comparison."""

import re
from collections.abc import Collection, Mapping, Sequence

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.cleanup import left_the_loop
from shakedown.diagnosis.analyze.divergence import CallDivergence, done_unlike, known_dtypes
from shakedown.diagnosis.analyze.edges import lone_group
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import Operation
from shakedown.stacks.frames import user_frames


def diverged(s: Situation) -> Hypothesis | None:
    """Pattern B: at one sequence number of a group the ranks made different calls."""
    if not s.divergences:
        return None
    # The list begins with the hardest evidence: see Situation.divergences.
    row = s.divergences[0]
    departing = s.departing(row.calls)
    # Where most ranks depart, the others may be those that skipped a call. Of half of them nothing
    # is known either where the dump does not even say who is in the group (format 1).
    listed = not row.group.description.startswith("pg_id ")
    minority = departing if 2 * len(departing) < len(row.calls) + listed else []
    cause = _kind(s, row, minority)
    half = len(row.calls) == 2
    keeping = sorted(set(row.calls) - set(departing)) or sorted(row.calls)
    return conclude(
        s,
        cause,
        _sentence(row, minority, keeping, dtype=cause == "dtype_mismatch"),
        ranks=minority,
        # Half the ranks on the branch could also mean that the other half skipped it.
        sure="told" if minority and (2 * len(minority) < len(row.calls) or half) else "open",
        evidence=s.recorded_at([*minority, *keeping]),
        waits=_between(row),
        needed=[]
        if minority
        else ["which branch is meant to be taken: the history of the ranks does not tell"],
    )


def differed(s: Situation) -> Hypothesis | None:
    """Calls that differ and are yet done on all ranks: nothing hangs in them."""
    row = done_unlike(s.facts.groups)
    if row is None or s.graph or s.waiting:
        return None
    cause = _kind(s, row, ())
    told = _sentence(row, [], sorted(row.calls), dtype=cause == "dtype_mismatch")
    return conclude(
        s,
        cause,
        f"{told}; all are through with it, and hold other results than they should",
        sure="open",
        evidence=s.recorded_at(sorted(row.calls)),
        needed=["what the job did next: its logs and stacks"],
        state="unknown",
    )


def _kind(s: Situation, row: CallDivergence, named: Collection[int]) -> Cause:
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


def _sentence(row: CallDivergence, departing: list[int], keeping: list[int], *, dtype: bool) -> str:
    at = f"collective {row.seq} of {row.group.label}"
    calls = {rank: describe(op, dtype=dtype) for rank, op in row.calls.items()}
    if departing:
        return (
            f"{name_ranks(departing)} called {calls[departing[0]]} as {at}, where "
            f"{name_ranks(keeping)} called {calls[keeping[0]]}: only {name_ranks(departing)} "
            f"{verb(departing, 'departs', 'depart')} from the calls of earlier steps"
        )
    kinds: dict[str, list[int]] = {}
    for rank, call in calls.items():
        kinds.setdefault(call, []).append(rank)
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


def _between(row: CallDivergence) -> list[Block]:
    kinds: dict[str, list[int]] = {}
    for rank, op in row.calls.items():
        kinds.setdefault(describe(op), []).append(rank)
    return [
        Block(ranks, others, f"entered {call}, number {row.seq}")
        for call, ranks in kinds.items()
        for other, others in kinds.items()
        if other != call
    ]


def extra_call(s: Situation) -> Hypothesis | None:
    """A rank entered a call that departs from its own steps and that nobody else will enter.

    Covers a branch on another process group, where no sequence number is shared.
    """
    pending = _pending(s)
    if not pending or any(
        s.positions[r].kind in _EXPLAINED for r in s.blockers if r in s.positions
    ):
        return None
    if any(not s.has_no_evidence(r) for r in s.blockers):
        return None  # who has entered no call at all is awaited, whatever the others called
    departing = s.departing(pending)
    # In the first step every call is new: only a rank with a history can depart from it.
    departing = [r for r in departing if s.departure(r, pending[r]).known]
    involved = [n for n in s.graph.awaited | s.graph.waiters if isinstance(n, int)]
    if not departing or 2 * len(departing) > len(involved):
        return None
    keeping = sorted(set(involved).difference(departing))
    # A call of every step, made before another group's: the order is what differs.
    apart = {pending[r].group for r in departing}.isdisjoint(
        pending[r].group for r in keeping if r in pending
    )
    usual = apart and all(_made_before(s, r, pending[r]) for r in departing)
    return conclude(
        s,
        "cross_group_cycle" if usual else "conditional_collective",
        f"{name_ranks(departing)} called {describe(pending[departing[0]])}, which departs from "
        f"the calls of earlier steps; {name_ranks(keeping)} {verb(keeping, 'does', 'do')} not join",
        ranks=departing,
        sure="seen",
        evidence=s.recorded_at(departing),
    )


def _made_before(s: Situation, rank: int, call: Operation) -> bool:
    record = s.ranks[rank].record
    return any(
        (op.group, op.name, op.sizes) == (call.group, call.name, call.sizes) and op.done
        for op in (record.operations if record else ())
    )


_EXPLAINED = frozenset({"dataloader", "storage", "compile", "busy", "stopped", "dead", "init"})


def _pending(s: Situation) -> Mapping[int, Operation]:
    """The first call of each rank that is not done."""
    pending: dict[int, Operation] = {}
    for rank, component in s.ranks.items():
        record = component.record
        undone = [op for op in record.operations if not op.done] if record else []
        if undone:
            pending[rank] = min(undone, key=lambda op: op.order)
    return pending


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
    ranks = sorted(r for row in calls.values() for r in row)
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
        evidence=s.seen_at(ranks),
        needed=["Flight Recorder dumps of all ranks: which group each call is of, and who left the "
                "usual order"],
    )  # fmt: skip


_OF_SIZES = re.compile(r"\bsizes?\b|\bshapes?\b|\bhas \d+ params\b", re.I)


def told_mismatch(s: Situation) -> Hypothesis | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compared the calls itself; two ranks, neither is blamed."""
    events = [e for e in s.facts.all_events() if e.kind == "collective_mismatch"]
    if not events:
        return None
    # The two calls, where torch gives them; else only that ranks do not agree.
    event = next((e for e in events if "call_a" in e.detail), events[0])
    if "call_a" not in event.detail:
        return conclude(
            s,
            "size_mismatch" if _OF_SIZES.search(event.text) else "collective_mismatch",
            f"the ranks do not agree: {event.text}",
            sure="open",
            evidence=[e.place for e in events[:4]],
            needed=["Flight Recorder dumps of all ranks, to tell which one left the usual order"],
        )
    first, second = str(event.detail.get("call_a", "")), str(event.detail.get("call_b", ""))
    ranks = [event.detail.get("rank_a"), event.detail.get("rank_b")]
    cause: Cause = "collective_mismatch"
    if _field(first, "OpType=") == _field(second, "OpType="):
        # One operation on both sides: their tensors differ, in size unless the types say otherwise.
        sizes, types = (
            _field(first, key) != _field(second, key) for key in ("TensorShape=", "TensorDtypes=")
        )
        # Where both differ they are different calls of one operation.
        cause = ("collective_mismatch" if sizes else "dtype_mismatch") if types else "size_mismatch"
    return conclude(
        s,
        cause,
        f"rank {ranks[0]} and rank {ranks[1]} made different calls: {_short(first)} against "
        f"{_short(second)}",
        sure="likely",
        evidence=[e.place for e in events[:4]],
        needed=["Flight Recorder dumps of all ranks, to tell which one left the usual order"],
    )


def _field(text: str, key: str) -> str:
    return text.partition(key)[2].split("]", 1)[0].split(",", 1)[0]


def _short(call: str) -> str:
    return call.split(", TensorDeviceTypes", 1)[0].replace("CollectiveFingerPrint(", "")


# Code of a data set, of which ordinary steps make no collective.
_DATA_CODE = re.compile(
    r"^(?:__getitem__|__iter__|__next__|collate\w*|\w*(?:build|make|prepare|create)_\w*data\w*)$"
)


def lone_call_from_data(s: Situation) -> Hypothesis | None:
    """One rank in a collective that its data code called, while all others wait for their data."""
    ranks = [r for r in s.at("collective") if s.positions[r].path]
    loading = s.at("dataloader")
    if len(ranks) != 1 or len(loading) < 2 or len(loading) + 1 < len(s.alive):
        return None
    position = s.positions[ranks[0]]
    users = user_frames(position.path)
    if not any(_DATA_CODE.match(f.function) or "/data" in f.file for f in users[-3:]):
        return None
    return conclude(
        s,
        "conditional_collective",
        f"{name_ranks(ranks)} waits alone in {position.where}, which its data code calls, while "
        f"{name_ranks(loading)} wait for their data loaders",
        ranks=ranks,
        sure="seen",
        evidence=[*s.seen_at(ranks), *s.seen_at(loading, 3)],
        waits=[Block(ranks, loading, f"entered {position.op}")],
        remedy="take the collective out of the data code, or let every rank call it",
    )


def makes_a_lone_group(s: Situation) -> Hypothesis | None:
    """Few ranks make a process group, in which all have to take part, and the others do not."""
    inside = s.at("init")
    if not lone_group(s, inside):
        return None
    outside = sorted(set(s.waiting).difference(inside))
    return conclude(
        s,
        "conditional_collective",
        f"{name_ranks(inside)} {verb(inside, 'makes', 'make')} a process group "
        f"({s.positions[inside[0]].where}), in which all have to take part, while "
        f"{name_ranks(outside)} {verb(outside, 'waits', 'wait')} in {s.waits_in(outside)}",
        ranks=inside,
        sure="likely",
        evidence=[*s.seen_at(inside), *s.seen_at(outside, 3)],
        waits=[Block(inside, outside, "entered the group's barrier")],
        remedy="make the group on every rank, or on none",
    )
