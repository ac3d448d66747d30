"""From facts to a diagnosis: pure. Six questions in order; the first answer is chosen."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Literal

from shakedown.diagnosis.analyze import (
    blocked,
    cleanup,
    differ,
    ended,
    liveness,
    nodes,
    one_job,
    one_place,
    pipeline,
    roles,
    said,
    servers,
    storage,
    user_code,
    weights,
)
from shakedown.diagnosis.analyze.classes import rank_classes
from shakedown.diagnosis.analyze.graph import Wait
from shakedown.diagnosis.analyze.model import Diagnosis, Hypothesis
from shakedown.diagnosis.analyze.raised import OWN, is_full
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.records import LogKind
from shakedown.diagnosis.summary import Summary, headline, summarise

# Of log events, and what rules may need beside them: `ranks`, several; `others`, of which no
# input need tell; `looks`, two at one process.
Kind = (
    LogKind
    | Literal["log", "outcome", "role", "ranks", "others", "stack", "dump", "beat", "state", "ras"]
    | Literal["looks", "digest"]
)


@dataclass(frozen=True)
class Rule:
    """One way to answer a question.

    `needs`: kinds of evidence, see `kinds_of`; where none of them is given the rule is not asked.
    `of_a_moment`: it reads where ranks stand at one moment, which a second look can refute. The
    others rest on what cannot pass: an end, an error, different calls under one number.
    """

    match: Callable[[Situation], Hypothesis | None]
    needs: Sequence[Kind]
    of_a_moment: bool = False


# What ended first explains what waits for it, calls that differ explain counters, and who blocks
# explains more than a common place. Within a question the order is that of the evidence's strength.
RULES: Sequence[Rule] = (
    # 1. Is this one job, and does it hang at all?
    Rule(one_job.completed, ("outcome", "beat", "finished")),
    # Before all rules that compare ranks: those of two jobs tell nothing about each other.
    Rule(one_job.mixed_jobs, ("dump", "beat", "stack")),
    Rule(one_job.job_state, ("job",)),
    Rule(one_job.cut_off, ("cancelled",)),
    # Before the rule that believes heartbeats: a rank whose beats are not written seems stuck.
    Rule(storage.heartbeat_blocked, ("looks",)),
    Rule(one_job.progressing, ("looks",)),
    # 2. Has something ended, or been stopped?
    Rule(nodes.node_dead, ("node",)),
    Rule(roles.ray_ended, ("role",)),
    Rule(roles.dead_role, ("outcome",)),
    Rule(ended.stopped_rank, ("state",)),
    Rule(blocked.too_few_gpus, ("too_few_gpus",)),
    # Before a dead rank: a stage that raises on a tensor's shape may have received it.
    Rule(pipeline.shape_error, ("traceback",)),
    Rule(ended.dead_rank, ("state", "outcome", "traceback", "exit", "abort", "oom", "gpu_error")),
    Rule(user_code.raised, ("traceback",)),
    Rule(ended.told_of_nobody, ("oom", "gpu_error", "exit")),
    # 3. Do the ranks' calls differ?
    Rule(pipeline.other_batches, ("beat",)),
    # Before the abort of a receiver: dumps tell whose call differs.
    Rule(differ.parted, ("dump",)),
    Rule(pipeline.size_abort, ("size_mismatch",)),
    Rule(differ.told_mismatch, ("collective_mismatch",)),
    Rule(differ.timed_out_apart, ("timeout",)),
    Rule(differ.splits_parted, ("dump",)),
    Rule(differ.messages_parted, ("dump",), of_a_moment=True),
    Rule(one_place.lone_call_from_data, ("ranks",), of_a_moment=True),
    Rule(one_place.makes_a_lone_group, ("ranks",), of_a_moment=True),
    # 4. Who blocks?
    Rule(storage.checkpoint_thread, ("stack",), of_a_moment=True),
    # Before the ranks: they wait in collectives because of the other side.
    Rule(weights.weights_by_stack, ("stack",), of_a_moment=True),
    Rule(cleanup.past_the_loop, ("ranks",), of_a_moment=True),
    Rule(roles.starvation, ("role", "beat", "log"), of_a_moment=True),
    Rule(storage.blocked_on_a_node, ("state",)),
    Rule(blocked.blocked_by_ranks, ("others",), of_a_moment=True),
    Rule(cleanup.uneven, ("beat",), of_a_moment=True),
    # Late, as this rank stands itself: the file system may not be what holds it.
    Rule(storage.heartbeat_and_rank_blocked, ("looks",)),
    Rule(blocked.told_missing, ("missing_ranks", "ras")),
    Rule(blocked.too_few_joined, ("missing_ranks",)),
    Rule(blocked.did_not_time_out, ("timeout",)),
    # 5. Do ranks wait for each other?
    Rule(differ.crossed_groups, ("dump", "ranks"), of_a_moment=True),
    Rule(one_place.two_threads, ("stack",), of_a_moment=True),
    Rule(one_place.one_way, ("ranks",), of_a_moment=True),
    # 6. Are all in one place? From here on no rule names a rank.
    Rule(one_place.all_blocked, ("state",)),
    Rule(blocked.start_without_somebody, ("stack",), of_a_moment=True),
    Rule(one_place.told_nccl, ("nccl_error", "traceback")),
    Rule(one_place.different_paths, ("ranks",), of_a_moment=True),
    Rule(one_place.one_place, ("ranks",), of_a_moment=True),
    Rule(user_code.too_slow, ("too_slow",)),
    Rule(servers.told_dead, ("server_unhealthy", "traceback")),
    Rule(differ.parted_before, ("dump",)),
    Rule(one_job.state_alone, ("job",)),
    Rule(said.by_its_words, ("digest", "traceback")),
)


def kinds_of(facts: Facts) -> set[Kind]:
    """Kinds of the evidence at hand: those of log events, and what rules may need beside them."""
    ranks, others = list(facts.ranks.values()), list(facts.roles.values())
    kinds: set[Kind] = {event.kind for event in facts.all_events()}
    given: dict[Kind, bool] = {
        "log": bool(kinds),
        "outcome": facts.outcome is not None,
        "node": bool(facts.nodes),
        "role": bool(others),
        "ranks": len(ranks) > 1,
        "others": len(facts.expected) > 1,
        "stack": any(c.stacks for c in ranks),
        "dump": any(c.flight for c in ranks),
        "beat": any(c.beats for c in ranks),
        "state": any(c.states or c.unattachable for c in ranks),
        "ras": any(c.ras for c in ranks),
        "digest": bool(facts.digests),
        "looks": any(_looks(c) > 1 for c in [*ranks, *others]),
    }
    return kinds.union(name for name, there in given.items() if there)


def _looks(component: ComponentFacts) -> int:
    """Moments at which it was looked at."""
    c = component
    rows = [[r.sample for r in c.stacks], [r.sample for r in c.states], [r.sample for r in c.beats]]
    return len(set(chain(*rows, (r.sample for r in c.flight))))


def _spoken(situation: Situation) -> Iterator[tuple[Rule, Hypothesis]]:
    """What the rules say whose needs are met, in their order."""
    kinds = kinds_of(situation.facts)
    for rule in RULES:
        found = rule.match(situation) if kinds.intersection(rule.needs) else None
        if found is not None:
            yield rule, found


def analyze(facts: Facts) -> Diagnosis:
    """Choose the strongest hypothesis; the others that name other culprits are conflicts."""
    situation = Situation(facts)
    spoken = list(_spoken(situation))
    summary = summarise(situation)
    chosen = spoken[0][1] if spoken else one_place.unknown(situation)
    if not spoken:
        chosen = replace(chosen, sentence=_unexplained(summary, chosen.sentence))
    waits = [*chosen.waits, situation.graph]
    if spoken and spoken[0][0].of_a_moment:
        chosen = _unless_open(liveness.tempered(situation, chosen))
    chosen = storage.explained(situation, chosen)
    chosen = liveness.weighed(situation, chosen)
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
