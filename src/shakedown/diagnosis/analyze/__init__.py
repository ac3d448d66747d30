"""From facts to a diagnosis: pure. A rule is a small function; the first that applies is chosen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shakedown.diagnosis.analyze import (
    gpu_use,
    liveness,
    rules_batches,
    rules_calls,
    rules_checkpoint,
    rules_collectives,
    rules_evidence,
    rules_init,
    rules_network,
    rules_order,
    rules_p2p,
    rules_process,
    rules_progress,
    rules_roles,
    rules_stacks,
    rules_storage,
    rules_sync,
    rules_told,
    rules_user,
    rules_weights,
)
from shakedown.diagnosis.analyze.classes import rank_classes
from shakedown.diagnosis.analyze.model import Diagnosis, Edge, Hypothesis, name_ranks
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import Facts

__all__ = ["RULES", "Diagnosis", "Edge", "Hypothesis", "analyze", "name_ranks"]

Rule = Callable[[Situation], Hypothesis | None]

# In order of strength: what ended first explains what waits for it; what a rank does explains
# why counters are behind; counters explain more than paths; paths more than a common place.
RULES: dict[str, Rule] = {
    "completed": rules_progress.completed,
    # Before all rules that compare ranks: those of two jobs tell nothing about each other.
    "mixed jobs": rules_evidence.mixed_jobs,
    "job state": rules_evidence.job_state,
    "checkpoint thread": rules_checkpoint.checkpoint_thread,
    # Before the rules that believe heartbeats: a rank whose beats are not written seems stuck.
    "heartbeat blocked": rules_storage.heartbeat_blocked,
    "progressing": rules_progress.progressing,
    "node dead": rules_process.node_dead,
    # These three before "size abort", which can only name whom gloo aborted, the receiver: dumps
    # tell whose call differs.
    "called from two threads": rules_calls.two_threads,
    "left early": rules_calls.left_early,
    "aborted call": rules_calls.aborted_call,
    "size abort": rules_batches.size_abort,
    "dead role": rules_roles.dead_role,
    "stopped rank": rules_process.stopped_rank,
    # Before "dead rank": a stage that raises on a tensor's shape may have received it.
    "shape error": rules_batches.shape_error,
    "dead rank": rules_process.dead_rank,
    "user code raised": rules_user.raised,
    "told mismatch": rules_told.told_mismatch,
    # Before the rules about collectives: ranks wait in those because of the other side.
    "weights by stack": rules_weights.weights_by_stack,
    "initialisation": rules_init.init_deadlock,
    "cleanup": rules_stacks.cleanup,
    "starvation": rules_roles.starvation,
    "weight update": rules_roles.weight_sync,
    "all blocked": rules_storage.all_blocked,
    "blocked on a node": rules_storage.blocked_on_a_node,
    "all in the loader": rules_stacks.all_in_loader,
    "other micro-batches": rules_batches.other_batches,
    "fewer micro-batches": rules_p2p.fewer_micro_batches,
    "diverged calls": rules_collectives.diverged,
    "timed out apart": rules_collectives.timed_out_apart,
    "splits": rules_p2p.splits,
    "extra call": rules_collectives.extra_call,
    "lone call from data code": rules_stacks.lone_call_from_data,
    # After differing calls, as this rank stands itself: the file system may not be what holds it.
    "heartbeat and rank blocked": rules_storage.heartbeat_and_rank_blocked,
    "outsider": rules_stacks.outsider,
    "GPUs wait": rules_sync.gpus_wait,
    "point to point": rules_p2p.point_to_point,
    "behind": rules_collectives.behind,
    "not posted": rules_p2p.not_posted,
    "crossed order": rules_calls.crossed_order,
    "crossed groups": rules_collectives.crossed,
    "opposite order": rules_order.opposite_order,
    # Late: such reports may list all ranks that have not finished, victims among them.
    "told missing": rules_told.told_missing,
    "told NCCL": rules_told.told_nccl,
    "two threads": rules_stacks.two_threads,
    "uneven inputs": rules_progress.uneven,
    "one way": rules_p2p.one_way,
    # From here on no rule names anybody: they apply where nothing tells who it was.
    "different paths": rules_stacks.different_paths,
    "one place": rules_collectives.one_place,
    "half done": rules_network.half_done,
    "too few joined": rules_init.too_few_joined,
    "user code too slow": rules_user.too_slow,
}


def analyze(facts: Facts) -> Diagnosis:
    """Choose the strongest hypothesis; the others that name other culprits are conflicts."""
    situation = Situation(facts)
    spoken = {name: h for name, rule in RULES.items() if (h := rule(situation)) is not None}
    first = next(iter(spoken), None)
    chosen = spoken[first] if first else rules_progress.unknown(situation)
    chosen = gpu_use.weighed(situation, liveness.tempered(situation, first, chosen))
    chosen = _by_node(facts, chosen)
    against = [
        f"{name}: {h.sentence}"
        for name, h in spoken.items()
        if name != first and _contradicts(h, chosen)
    ]
    conflicts = [*facts.conflicts, *against]
    # 0.1 for each conflict is a judgement, not measured: see docs/hang.md.
    chosen = replace(chosen, confidence=max(chosen.confidence - 0.1 * len(conflicts), 0.1))
    return Diagnosis(
        chosen=chosen,
        classes=rank_classes(facts.ranks, situation.positions),
        edges=_edges(chosen, situation),
        conflicts=conflicts,
        notes=_notes(facts),
        candidates=_candidates(first, spoken),
    )


def _candidates(first: str | None, spoken: Mapping[str, Hypothesis]) -> list[Hypothesis]:
    """Also of a diagnosis that is unknown because it is too early: what it would be otherwise."""
    ordered = sorted(spoken.items(), key=lambda row: (row[0] != first, -row[1].confidence))
    found: dict[object, Hypothesis] = {}
    for _, row in ordered:
        if row.cause not in ("unknown", "healthy"):
            found.setdefault((row.cause, row.culprits), row)
    return list(found.values())


def _by_node(facts: Facts, chosen: Hypothesis) -> Hypothesis:
    """Where no input says which process is which rank, the node is what is known of a culprit."""
    hosts = {facts.ranks[r].host for r in chosen.ranks if r in facts.ranks}
    if not facts.guessed or not hosts or "" in hosts:
        return chosen
    told = f"{chosen.sentence}; ranks are counted by process id, the culprit's node is known"
    return replace(chosen, ranks=(), nodes=sorted({*chosen.nodes, *hosts}), sentence=told)


def _contradicts(other: Hypothesis, chosen: Hypothesis) -> bool:
    named = any(other.culprits)
    innocent = set(other.ranks) - set(chosen.ranks)
    return (
        chosen.state == "hung"
        and named
        and (bool(innocent) or other.culprits[1:] != chosen.culprits[1:])
    )


def _edges(chosen: Hypothesis, situation: Situation) -> Sequence[Edge]:
    return chosen.edges or rules_collectives.wait_edges(situation.waits)


def _notes(facts: Facts) -> list[str]:
    if not facts.unplaced:
        return []
    pids = ", ".join(str(s.who.pid) for s in facts.unplaced[:8])
    return [f"{len(facts.unplaced)} stacks belong to no known rank (process {pids})"]
