"""Ranks that all wait for their GPUs: calls of torch return at once, so no stack shows the call.

What keeps a GPU is a collective that one rank has not launched: whoever stands elsewhere, twice
at the same place, is it.
"""

from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.model import Edge, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.rules_stacks import OUTSIDE, places_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts

# Where a rank that launches nothing stands; waiting for work or for a batch is no such place.
_ELSEWHERE = ("dataloader", "storage", "compile", "busy", "user")


def gpus_wait(s: Situation) -> Hypothesis | None:
    """All ranks but few wait for their GPUs and nobody in a collective; no rank moved meanwhile."""
    synced, outside = s.at("host_sync"), s.at(*_ELSEWHERE)
    # Where a rank is seen in a call, the rules about calls say more.
    if s.waiting or not outside or len(synced) < 2 or set(synced + outside) != s.expected_ranks:
        return None
    if 2 * len(outside) > len(s.alive) or not all(_stood(s.ranks[r]) for r in s.alive):
        return None
    first = s.positions[outside[0]]
    cause, says, remedy, blame = OUTSIDE[first.kind]
    named = [r for r in outside if s.positions[r].kind == first.kind]
    return Hypothesis(
        cause,
        f"{name_ranks(named)} {verb(named, *says)} ({first.where}) in every sample, while "
        f"{name_ranks(synced)} {verb(synced, 'waits for its GPU', 'wait for their GPUs')} "
        f"({s.positions[synced[0]].where})",
        ranks=named,
        victims=sorted(set(s.alive) - set(named)),
        confidence=0.7,
        evidence=[*places_of(s, named), *places_of(s, synced, 2)],
        needed=["Flight Recorder dumps: the collective that the GPUs wait in"],
        edges=[Edge(f"rank {a}", f"rank {b}", "a call not launched") for a in synced[:50]
               for b in named[:4]],
        remedy=remedy,
        blame=blame,
    )  # fmt: skip


def _stood(component: ComponentFacts) -> bool:
    """At least two samples of the main thread, all on one path."""
    paths = {st.sample: path_key(st.main.frames) for st in component.stacks if st.main}
    return len(paths) > 1 and len(set(paths.values())) == 1
