"""Rules about collectives: their order in each group, from dumps, watchdog lines and RAS."""

from collections.abc import Iterable, Mapping, Sequence

from shakedown.diagnosis.analyze.model import Cause, Edge, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.position import in_nccl_enqueue, user_frames
from shakedown.diagnosis.analyze.rules_stacks import places_of
from shakedown.diagnosis.analyze.situation import WAITING, CallDivergence, Situation, known_dtypes
from shakedown.diagnosis.analyze.waiting import Wait
from shakedown.diagnosis.records import Operation, SourceRef


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
    cause = _kind(row, named=bool(minority))
    keeping = sorted(set(row.calls) - set(departing)) or sorted(row.calls)
    return Hypothesis(
        cause,
        _sentence(row, minority, keeping),
        ranks=minority,
        victims=sorted(set(row.group.members) - set(minority)),
        pattern="B",
        confidence=_confidence(len(minority), len(row.calls)),
        evidence=_dump_places(s, [*minority, *keeping]),
        edges=_between(row),
        needed=[]
        if minority
        else ["which branch is meant to be taken: the history of the ranks does not tell"],
        remedy="make every rank of the group take the same branch before this call",
    )


def _confidence(named: int, all_ranks: int) -> float:
    """Half the ranks on the branch could also mean that the other half skipped it."""
    if not named:
        return 0.5
    return 0.65 if 2 * named == all_ranks and all_ranks > 2 else 0.9


def _kind(row: CallDivergence, *, named: bool) -> Cause:
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


def _sentence(row: CallDivergence, departing: list[int], keeping: list[int]) -> str:
    usual = f"{describe(row.calls[keeping[0]])}"
    at = f"collective {row.seq} of {row.group.label}"
    if departing:
        return (
            f"{name_ranks(departing)} called {describe(row.calls[departing[0]])} as {at}, where "
            f"{name_ranks(keeping)} called {usual}: only {name_ranks(departing)} "
            f"{verb(departing, 'departs', 'depart')} from the calls of earlier steps"
        )
    kinds: dict[str, list[int]] = {}
    for rank, op in row.calls.items():
        kinds.setdefault(describe(op), []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} {call}" for call, ranks in kinds.items())
    return f"ranks made different calls as {at}: {told}"


def describe(op: Operation) -> str:
    """`broadcast of [2] float at log_metrics (hang.py:30)`."""
    name = op.name.split(":", 1)[-1]
    sizes = f" of {list(op.sizes[0])}" if op.sizes else ""
    users = user_frames(op.frames)
    frame = users[-1] if users else None
    return f"{name}{sizes}" + (f" at {frame}" if frame else "")


def _between(row: CallDivergence) -> list[Edge]:
    kinds: dict[str, list[int]] = {}
    for rank, op in row.calls.items():
        kinds.setdefault(describe(op), []).append(rank)
    edges = []
    for call, ranks in kinds.items():
        for other, others in kinds.items():
            if other != call:
                pairs = [(a, b) for a in ranks for b in others]
                why = f"{call}, number {row.seq}, not entered"
                edges += [Edge(f"rank {a}", f"rank {b}", why) for a, b in pairs[:100]]
    return edges[:200]


def _dump_places(s: Situation, ranks: Sequence[int]) -> list[SourceRef]:
    places = [c.record.place for r in ranks[:8] if (c := s.ranks[r]).record]
    return [*places, *places_of(s, list(ranks)[:4])]


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
    involved = sorted(s.waits.awaited | s.waits.waiters)
    if not departing or 2 * len(departing) > len(involved):
        return None
    keeping = sorted(set(involved) - set(departing))
    return Hypothesis(
        "conditional_collective",
        f"{name_ranks(departing)} called {describe(pending[departing[0]])}, which departs from "
        f"the calls of earlier steps; {name_ranks(keeping)} {verb(keeping, 'does', 'do')} not join",
        ranks=departing,
        victims=keeping,
        pattern="B",
        confidence=0.8,
        evidence=_dump_places(s, departing),
        edges=wait_edges(s.waits),
        remedy="make every rank of the group take the same branch before this call",
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


def behind(s: Situation) -> Hypothesis | None:
    """Ranks that others wait for and that wait for nobody: the counters name them."""
    silent = [r for r in s.blockers if s.has_no_evidence(r)]
    seen = sorted(set(s.blockers) - set(silent))
    # A rank that waits in a call is not the root cause, though no counter shows for whom it waits.
    roots = [r for r in seen if s.positions[r].kind not in WAITING]
    culprits = roots or _sole(s, silent)
    named = set(culprits)
    first, waiters = s.waits.first_for(named), sorted(s.waits.waiters_of(named))
    if first is None or _many(s, culprits, set(waiters)):
        return None
    others = bool(set(silent) - set(culprits))
    kind = s.positions[culprits[0]].kind if culprits[0] in s.positions else "unknown"
    return Hypothesis(
        "missing_rank",
        f"{name_ranks(culprits)} {verb(culprits, 'has', 'have')} not entered {_call(first)}, "
        f"which {name_ranks(waiters)} {verb(waiters, 'waits', 'wait')} in"
        f"{_side(s, culprits, culprits == silent)}",
        ranks=culprits,
        victims=sorted(set(s.facts.expected) - set(culprits)),
        # A rank that was seen elsewhere, or one of which nothing but its absence is known.
        confidence=0.9 if roots else 0.6,
        evidence=_dump_places(s, [*roots, *waiters]),
        needed=[
            *([f"a stack of {name_ranks(culprits)} (py-spy dump)"] if kind == "unknown" else []),
            *([f"Flight Recorder dumps of {name_ranks(silent)}, awaited too"] if others else []),
        ],
        edges=wait_edges(s.waits),
        remedy="see what the missing rank does: its stack, its log, its GPU's error counters",
    )


def _sole(s: Situation, silent: list[int]) -> list[int]:
    """The one rank of which nothing is known, where all others left a dump that speaks.

    Of several, each may be a victim whose files are lost; an empty dump may hide calls.
    """
    spoke = [r for r, c in s.ranks.items() if c.record and not s.has_no_evidence(r)]
    alone = len(silent) == 1 and len(spoke) == len(s.expected_ranks) - 1
    return silent if alone and silent[0] not in s.ranks else []


def _many(s: Situation, culprits: list[int], waiters: set[int]) -> bool:
    """More than half of those concerned, by counters alone: the few may have called too much."""
    stacks = any(r in s.ranks and s.positions[r].path for r in culprits)
    return 2 * len(culprits) > len(waiters | set(culprits)) and not stacks


def _call(wait: Wait) -> str:
    name = wait.operation.name if wait.operation else "collective"
    return f"{name} (number {wait.seq} of {wait.group.label})"


def _side(s: Situation, culprits: list[int], silent: bool) -> str:
    if silent:
        return "; it left no dump"
    open_calls = [
        sum(not op.done for op in r.operations) for c in culprits if (r := s.ranks[c].record)
    ]
    if all(open_calls) and open_calls:
        return f"; the host is {open_calls[0]} calls ahead of the device, which stands still"
    return "; the last call is done and the host does not go on"


def wait_edges(waits: Iterable[Wait]) -> list[Edge]:
    """The graph as text, each pair once, at most 200 edges."""
    seen: dict[tuple[int, int], Edge] = {}
    for wait in waits:
        pair = (wait.waiter, wait.awaited)
        if pair not in seen:
            seen[pair] = Edge(f"rank {wait.waiter}", f"rank {wait.awaited}", wait.why)
        if len(seen) == 200:
            break
    return list(seen.values())


def crossed(s: Situation) -> Hypothesis | None:
    """Ranks wait for each other in different groups."""
    if not s.cycle or s.blockers:
        return None
    first = s.waits.firsts(set(s.cycle), 4)
    told = "; ".join(f"rank {r} in {_call(w)}" for r, w in first.items())
    return Hypothesis(
        "cross_group_cycle",
        f"{name_ranks(s.cycle)} wait for each other in different groups: {told}",
        victims=s.cycle,
        pattern="B",
        confidence=0.75,
        evidence=_dump_places(s, s.cycle),
        edges=wait_edges(s.waits),
        needed=["the order in which the code is meant to use these groups"],
        remedy="let all ranks use their groups in one order",
    )


def timed_out_apart(s: Situation) -> Hypothesis | None:
    """Ranks timed out in different calls, of which no line names the group.

    Groups of a job have as many members each: ranks of several such wait for somebody else.
    """
    calls: dict[str, list[int]] = {}
    for rank in s.at("collective"):
        if not s.positions[rank].path:
            calls.setdefault(s.positions[rank].op, []).append(rank)
    sizes = {len(ranks) for ranks in calls.values()}
    if len(calls) < 2 or (len(sizes) == 1 and sizes != {1}) or s.waits:
        return None
    ranks = sorted(r for row in calls.values() for r in row)
    told = "; ".join(f"{name_ranks(row)} in {call}" for call, row in list(calls.items())[:4])
    return Hypothesis(
        "collective_mismatch",
        f"ranks timed out in different calls: {told}",
        victims=ranks,
        pattern="B",
        confidence=0.55,
        evidence=places_of(s, ranks),
        needed=["Flight Recorder dumps of all ranks: which group each call is of, and who left the "
                "usual order"],
        state="hung" if s.stuck else "exited",
        remedy="look for a branch that not all ranks take before these calls",
    )  # fmt: skip


def one_place(s: Situation) -> Hypothesis | None:
    """Pattern C: every rank waits in the same call and none is behind."""
    ranks = s.waiting
    if len(ranks) < 2 or len(ranks) < len(s.expected_ranks) or s.waits:
        return None
    if len({s.positions[r].op for r in ranks if not s.positions[r].path}) > 1:
        return None
    native = [r for r in ranks if in_nccl_enqueue(s.ranks[r])]
    world = any(set(g.members) >= set(ranks) for g in s.facts.groups)
    names = [e for c in s.ranks.values() for e in c.events if e.kind == "nccl_error"]
    cause: Cause = "nccl_internal" if native else "network"
    return Hypothesis(
        cause,
        f"all {len(ranks)} ranks wait in {_common_call(s, ranks[0])} and none is behind: "
        + ("inside NCCL's enqueue" if native else "the network or the library, not a branch"),
        victims=ranks,
        pattern="C",
        # Dumps count calls and show that none is behind. Stacks cannot, and without the world size
        # a rank may be missing altogether.
        confidence=0.7 if any(s.ranks[r].record for r in ranks) else 0.55 if world else 0.45,
        evidence=[*[e.place for e in names[:3]], *places_of(s, ranks)],
        needed=[
            *([] if world else ["the world size: a rank of which no file tells may be missing"]),
            "NCCL_DEBUG=INFO logs, link error counters, and a second sample after a minute",
        ],
        remedy="run `shakedown preflight` on these nodes",
        blame="link",
    )


def _common_call(s: Situation, rank: int) -> str:
    if s.positions[rank].path:
        return s.positions[rank].where
    for group in s.facts.groups:
        view = group.views.get(rank)
        op = view.operations.get(view.pending) if view and view.pending else None
        if op is not None:
            return f"{describe(op)} (number {op.seq} of {group.label})"
    return "the same collective"
