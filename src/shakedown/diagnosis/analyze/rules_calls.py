"""Rules that read calls beside a second source: heartbeats, the thread that called, an abort.

gloo does not wait where calls do not fit: it aborts the process that receives more than it
expects. Who aborts is a victim as often as not; what each rank called is in its dump.
"""

from collections.abc import Mapping
from dataclasses import replace

from shakedown.diagnosis.analyze.model import Edge, Hypothesis, State, name_ranks, verb
from shakedown.diagnosis.analyze.rules_collectives import describe, diverged
from shakedown.diagnosis.analyze.situation import CallDivergence, Situation
from shakedown.diagnosis.records import Operation, SourceRef
from shakedown.monitor.heartbeat import Beat


def state_of(s: Situation) -> State:
    """A stage that ended by itself did not hang."""
    return "hung" if s.stuck else "exited"


def _dumps(s: Situation, ranks: list[int]) -> list[SourceRef]:
    return [c.record.place for r in ranks[:8] if (c := s.ranks[r]).record]


def two_threads(s: Situation) -> Hypothesis | None:
    """Where the calls of a group differ, some came from a second thread of their process."""
    for row in s.divergences:
        called = [r for r, op in row.calls.items() if _in_thread(op)]
        if not called or len(called) == len(row.calls):
            continue
        both = [r for r in row.group.views if _from_two_threads(row, r)]
        if both:
            return _two_threads(s, row, sorted(called), sorted(both))
    return None


def _in_thread(op: Operation) -> bool:
    """Python started the thread; autograd's own threads have no such frame."""
    outer = op.frames[0] if op.frames else None
    return outer is not None and outer.function == "_bootstrap" and "threading" in outer.file


def _from_two_threads(row: CallDivergence, rank: int) -> bool:
    framed = [op for op in row.group.views[rank].operations.values() if op.frames]
    return len({_in_thread(op) for op in framed}) > 1


def _two_threads(
    s: Situation, row: CallDivergence, called: list[int], both: list[int]
) -> Hypothesis:
    """A rank is named where it alone has a second thread: elsewhere their order is at fault."""
    named = both if both == called and 2 * len(both) <= len(row.calls) else []
    others = sorted(set(row.calls) - set(called))
    return Hypothesis(
        "two_threads_one_group",
        f"{name_ranks(called)} called {describe(row.calls[called[0]])} from a second thread as "
        f"collective {row.seq} of {row.group.label}, where {name_ranks(others)} called "
        f"{describe(row.calls[others[0]])}",
        ranks=named,
        victims=sorted(set(row.group.members) - set(named)),
        confidence=0.9 if named else 0.7,
        evidence=_dumps(s, [*called, *others]),
        needed=[] if named else ["the order in which the threads are meant to call"],
        state=state_of(s),
        remedy="give each thread a process group of its own",
    )


def left_early(s: Situation) -> Hypothesis | None:
    """Ranks that have gone on to the end without a batch of the step that the others train on."""
    beats = {r: c.beat.beat for r, c in s.ranks.items() if c.beat}
    for row in s.divergences:
        short = _without_batch(row, beats)
        # Both sources have to agree: the heartbeats' short ranks are those whose calls depart.
        if not short or short != s.departing(row.calls) or 2 * len(short) > len(row.calls):
            continue
        training = sorted(set(row.calls) - set(short))
        first = beats[short[0]]
        places = [b.place for r in [*short, *training][:4] if (b := s.ranks[r].beat)]
        return Hypothesis(
            "uneven_inputs",
            f"{name_ranks(short)} left the loop for its {first.phase} without a batch of step "
            f"{first.step}, on which {name_ranks(training)} {verb(training, 'trains', 'train')}; "
            f"{describe(row.calls[short[0]])} met {describe(row.calls[training[0]])}",
            ranks=short,
            victims=training,
            confidence=0.85,
            evidence=[*places, *_dumps(s, [*short, *training])],
            edges=[
                Edge(f"rank {a}", f"rank {b}", "its batches have ended")
                for a in training[:100]
                for b in short[:2]
            ],
            state=state_of(s),
            remedy="give every rank the same number of batches: drop the last ones or pad",
        )
    return None


def _without_batch(row: CallDivergence, beats: Mapping[int, Beat]) -> list[int]:
    """Ranks in a phase after the loop at the very step that all the others train on."""
    if not set(row.calls) <= set(beats) or len({beats[r].step for r in row.calls}) > 1:
        return []
    training = {r for r in row.calls if beats[r].phase == "train" and beats[r].batch_size > 0}
    beyond = {
        r
        for r in row.calls
        if beats[r].phase in ("eval", "checkpoint", "finished") and not beats[r].batch_size
    }
    # A rank in a third phase (waiting for rollouts, say) would need another explanation.
    return sorted(beyond) if len(training) + len(beyond) == len(row.calls) else []


def aborted_call(s: Situation) -> Hypothesis | None:
    """gloo aborted a receiver, and the dumps say which ranks made another call."""
    events = [e for c in s.ranks.values() for e in c.events if e.kind == "size_mismatch"]
    told = diverged(s) if events else None
    if told is None:
        return None
    return replace(
        told, state=state_of(s), evidence=[events[0].place, *told.evidence], edges=told.edges
    )


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
    return Hypothesis(
        "cross_group_cycle",
        f"rank {few[0]} waits in {_told(calls[few[0]])}, while {name_ranks(many)} "
        f"{verb(many, 'waits', 'wait')} in {_told(calls[many[0]])}: each group waits for ranks "
        "that wait in the other",
        ranks=named,
        victims=sorted(set(calls) - set(named)),
        pattern="B",
        confidence=0.7 if named else 0.75,
        evidence=_dumps(s, [*few, *many]),
        needed=["the order in which the code is meant to use these groups"],
        edges=[
            Edge(f"rank {a}", f"rank {b}", f"{_told(calls[a])}, not entered")
            for a, b in [*((few[0], m) for m in many[:50]), *((m, few[0]) for m in many[:50])]
        ],
        remedy="let all ranks use their groups in one order",
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


def _told(op: Operation) -> str:
    return f"{describe(op)} (number {op.seq} of group {op.group})"
