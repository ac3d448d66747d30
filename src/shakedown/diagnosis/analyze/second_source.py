"""Question 3 by calls beside a second source: heartbeats, the thread that called, an abort.

gloo does not wait where calls do not fit: it aborts the process that receives more than it
expects. Who aborts is a victim as often as not; what each rank called is in its dump.
"""

from collections.abc import Mapping
from dataclasses import replace

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.differ import describe, diverged
from shakedown.diagnosis.analyze.divergence import CallDivergence
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.records import Operation
from shakedown.progress.signs import Beat


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
    return replace(told, evidence=[events[0].place, *told.evidence])
