"""From facts to a diagnosis: pure. Six questions in order; the first answer is chosen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from shakedown.diagnosis.analyze import (
    actors,
    blocked,
    cleanup,
    cycles,
    differ,
    ended,
    gpu_use,
    liveness,
    messages,
    nodes,
    one_job,
    one_place,
    pipeline,
    roles,
    second_source,
    servers,
    storage,
    user_code,
    weights,
)
from shakedown.diagnosis.analyze.classes import rank_classes
from shakedown.diagnosis.analyze.graph import Wait
from shakedown.diagnosis.analyze.model import Diagnosis, Hypothesis, name_ranks
from shakedown.diagnosis.analyze.raised import OWN, is_full
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import Facts
from shakedown.diagnosis.summary import Summary, headline, summarise

__all__ = ["QUESTIONS", "Diagnosis", "Hypothesis", "Rule", "analyze", "name_ranks"]


@dataclass(frozen=True)
class Rule:
    """One way to answer a question.

    `of_a_moment`: it reads where ranks stand at one moment, which a second look can refute. The
    others rest on what cannot pass: an end, an error, different calls under one number.
    """

    match: Callable[[Situation], Hypothesis | None]
    of_a_moment: bool = False


def _lasting(*matches: Callable[[Situation], Hypothesis | None]) -> list[Rule]:
    return [Rule(match) for match in matches]


def _of_a_moment(*matches: Callable[[Situation], Hypothesis | None]) -> list[Rule]:
    return [Rule(match, of_a_moment=True) for match in matches]


# What ended first explains what waits for it, calls that differ explain counters, and who blocks
# explains more than a common place. Within a question the order is that of the evidence's strength.
QUESTIONS: Mapping[str, Sequence[Rule]] = {
    "Is this one job, and does it hang at all?": _lasting(
        one_job.completed,
        # Before all rules that compare ranks: those of two jobs tell nothing about each other.
        one_job.mixed_jobs,
        one_job.job_state,
        one_job.cut_off,
        # Before the rule that believes heartbeats: a rank whose beats are not written seems stuck.
        storage.heartbeat_blocked,
        one_job.progressing,
    ),
    "Has something ended, or been stopped?": _lasting(
        nodes.node_dead,
        actors.head_lost,
        roles.dead_role,
        ended.stopped_rank,
        actors.actor_ended,
        blocked.too_few_gpus,
        # Before a dead rank: a stage that raises on a tensor's shape may have received it.
        pipeline.shape_error,
        # Before a dead rank: nobody waits for it.
        ended.parted,
        ended.dead_rank,
        user_code.raised,
        ended.told_of_nobody,
    ),
    "Do the ranks' calls differ?": [
        # These three before the abort of a receiver: dumps tell whose call differs.
        *_lasting(
            second_source.two_threads,
            second_source.left_early,
            second_source.aborted_call,
            pipeline.size_abort,
            differ.told_mismatch,
            pipeline.other_batches,
        ),
        *_of_a_moment(pipeline.fewer_micro_batches),
        *_lasting(differ.diverged, differ.timed_out_apart, messages.splits),
        *_of_a_moment(
            messages.point_to_point,
            differ.extra_call,
            differ.lone_call_from_data,
            differ.makes_a_lone_group,
        ),
    ],
    "Who blocks?": [
        *_of_a_moment(
            storage.checkpoint_thread,
            # Before the ranks: they wait in collectives because of the other side.
            weights.weights_by_stack,
            cleanup.past_the_loop,
            roles.starvation,
            roles.weight_sync,
        ),
        *_lasting(storage.blocked_on_a_node),
        *_of_a_moment(blocked.blocked_by_ranks, cleanup.uneven, actors.actor_works_alone),
        # Late, as this rank stands itself: the file system may not be what holds it.
        *_lasting(
            storage.heartbeat_and_rank_blocked,
            blocked.told_missing,
            blocked.too_few_joined,
            blocked.did_not_time_out,
        ),
    ],
    "Do ranks wait for each other?": _of_a_moment(
        cycles.crossed_order,
        cycles.crossed,
        cycles.opposite_order,
        cycles.two_threads,
        cycles.one_way,
    ),
    # From here on no rule names a rank.
    "Are all in one place?": [
        *_lasting(one_place.all_blocked),
        *_of_a_moment(one_place.all_in_loader, blocked.start_without_somebody),
        *_lasting(one_place.told_nccl),
        *_of_a_moment(one_place.different_paths, one_place.one_place, one_place.half_done),
        *_lasting(user_code.too_slow, servers.told_dead, differ.differed, one_job.state_alone),
    ],
}


def analyze(facts: Facts) -> Diagnosis:
    """Choose the strongest hypothesis; the others that name other culprits are conflicts."""
    situation = Situation(facts)
    rules = [rule for rules in QUESTIONS.values() for rule in rules]
    spoken = [(rule, h) for rule in rules if (h := rule.match(situation)) is not None]
    rule, chosen = spoken[0] if spoken else (Rule(one_place.unknown), one_place.unknown(situation))
    summary = summarise(situation)
    if not spoken:
        chosen = replace(chosen, sentence=_unexplained(summary, chosen.sentence))
    waits = [*chosen.waits, situation.graph]
    if rule.of_a_moment:
        chosen = _unless_open(liveness.tempered(situation, chosen))
    chosen = storage.explained(situation, chosen)
    chosen = gpu_use.weighed(situation, chosen)
    chosen = _or_another_reason(situation, chosen)
    chosen = _with_actors(facts, _unless_guessed(facts, chosen))
    against = [f"{h.cause}: {h.sentence}" for _, h in spoken[1:] if _contradicts(h, chosen)]
    conflicts = [*facts.conflicts, *against]
    # 0.1 for each conflict is a judgement, not measured: see docs/hang.md.
    chosen = replace(chosen, confidence=max(chosen.confidence - 0.1 * len(conflicts), 0.1))
    return Diagnosis(
        chosen=chosen,
        classes=rank_classes(facts.ranks, situation.positions),
        waits=_pairs(waits),
        conflicts=conflicts,
        notes=_notes(facts),
        candidates=_candidates([h for _, h in spoken]),
        summary=summary.to_json(),
    )


def _unexplained(summary: Summary, sentence: str) -> str:
    """What was seen comes before how far the evidence goes."""
    reach = sentence.removesuffix(f"; {one_place.NO_CAUSE}")
    told = headline(summary) if reach != sentence else ""
    return f"{told}; {reach}" if told else sentence


def _candidates(spoken: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Also of a diagnosis that is unknown because it is too early: what it would be otherwise."""
    found: dict[object, Hypothesis] = {}
    for row in [*spoken[:1], *sorted(spoken[1:], key=lambda row: -row.confidence)]:
        if row.cause not in ("unknown", "healthy"):
            found.setdefault((row.cause, row.culprits), row)
    return list(found.values())


# What can follow from a want of memory, a failed GPU or node, or a full disk.
_FOLLOWS = frozenset(
    {
        "rank_busy", "missing_rank", "network", "nccl_internal", "init_deadlock",
        "server_unhealthy", "rollout_starvation", "weight_sync_one_sided", "host_sync_divergence",
    }
)  # fmt: skip
_REASONS = frozenset({*OWN, "node"})


def _or_another_reason(s: Situation, chosen: Hypothesis) -> Hypothesis:
    """Two reasons of which nothing tells that one follows from the other."""
    events = [e for e in s.facts.all_events() if e.kind in _REASONS or is_full(e)]
    other = next((e for e in events if e.place not in chosen.evidence), None)
    if chosen.cause not in _FOLLOWS or other is None:
        return chosen
    return replace(
        one_place.unknown(s),
        sentence=f"{chosen.sentence}, or {other.text}: which of the two came first is not known",
        evidence=[*chosen.evidence[:4], other.place],
    )


def _unless_guessed(facts: Facts, chosen: Hypothesis) -> Hypothesis:
    """Where no input says which process is which rank nobody is named: a file's name is no node."""
    if not facts.guessed or not chosen.ranks:
        return chosen
    told = f"{chosen.sentence}; ranks are counted by process id: which one it is nothing tells"
    return replace(chosen, ranks=(), sentence=told)


def _with_actors(facts: Facts, chosen: Hypothesis) -> Hypothesis:
    """Which actors of Ray the named ranks are: nobody finds one by its number."""
    told = [f"rank {r} is {facts.actors[r]}" for r in sorted(chosen.ranks)[:4] if r in facts.actors]
    if not told:
        return chosen
    return replace(chosen, sentence=f"{chosen.sentence}; {', '.join(told)}")


def _unless_open(chosen: Hypothesis) -> Hypothesis:
    """What was seen is said, and the guides' pattern; what fits best stands in `candidates`."""
    return replace(chosen, cause="unknown", confidence=0.0) if chosen.cause_open else chosen


def _contradicts(other: Hypothesis, chosen: Hypothesis) -> bool:
    named = any(other.culprits)
    innocent = set(other.ranks) - set(chosen.ranks)
    return (
        chosen.state == "hung"
        and named
        and (bool(innocent) or other.culprits[1:] != chosen.culprits[1:])
    )


_PAIRS = 200  # the graph of large jobs repeats itself


def _pairs(waits: Sequence[Iterable[Wait]]) -> list[Wait]:
    """What the rule adds, and the graph that all rules read; each pair once."""
    seen: dict[object, Wait] = {}
    # Bounded: a source may hold millions of pairs.
    for wait in islice(chain.from_iterable(waits), 100 * _PAIRS):
        seen.setdefault((wait.waiter, wait.awaited), wait)
        if len(seen) == _PAIRS:
            break
    return list(seen.values())


def _notes(facts: Facts) -> list[str]:
    if not facts.unplaced:
        return facts.left_out
    pids = ", ".join(str(s.who.pid) for s in facts.unplaced[:8])
    stacks = f"{len(facts.unplaced)} stacks belong to no known rank (process {pids})"
    return [*facts.left_out, stacks]
