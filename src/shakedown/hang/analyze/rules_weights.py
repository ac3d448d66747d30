"""A weight update seen in stacks alone: trainers hand weights over and nobody takes them.

Ranks that wait in it are victims: this rule never names one.
"""

from functools import lru_cache

from shakedown.hang.analyze.frames import calls_out, weight_update
from shakedown.hang.analyze.model import Edge, Hypothesis, name_ranks, verb
from shakedown.hang.analyze.position import user_frames
from shakedown.hang.analyze.rules_stacks import places_of
from shakedown.hang.analyze.situation import Situation
from shakedown.hang.facts import Component
from shakedown.hang.records import Frame

_SERVER = "inference"
_WAITS = frozenset({"collective", "p2p", "init"})


def weights_by_stack(s: Situation) -> Hypothesis | None:
    """Every rank waits and some of them in the hand-over of weights to an inference engine."""
    inside = [r for r in s.alive if _hands_over(s, r)]
    others = [r for r in s.alive if r not in inside]
    if not inside or s.dead or s.roots or s.divergences:
        return None
    if any(s.positions[r].kind not in _WAITS for r in others):
        return None  # who stands elsewhere explains it better
    server = s.facts.roles.get(_SERVER)
    if server is None and len(others) > len(inside) and not _asks(s, inside):
        return None  # the others may be expected in it: ranks alone do not tell
    if server is not None and _takes_part(server):
        return None
    known = server is not None and bool(server.path)
    frame = weight_update(user_frames(s.positions[inside[0]].path))
    seen = ""
    if server is not None and server.path:
        seen = f", while the inference engine is in {(user_frames(server.path) or server.path)[-1]}"
    return Hypothesis(
        "weight_sync_one_sided",
        f"{name_ranks(inside)} {verb(inside, 'waits', 'wait')} in the weight update "
        f"({frame}){seen}",
        roles=[_SERVER] if known else [],
        victims=sorted(s.ranks),
        confidence=0.8 if known else 0.5,
        evidence=[*places_of(s, inside), *([st.place] if server and (st := server.stack) else [])],
        needed=[] if known else ["log and stacks of the inference engine"],
        edges=[Edge(f"rank {r}", _SERVER, "weights not taken") for r in inside[:200]],
        remedy="check that trainer and engine agree on the weight version and on the group's size",
    )


def _asks(s: Situation, ranks: list[int]) -> bool:
    """One of them waits for another process's answer."""
    return any(calls_out(s.positions[r].path) for r in ranks)


def _hands_over(s: Situation, rank: int) -> bool:
    position = s.positions[rank]
    inside = _updates(position.path)
    return inside and (position.kind in _WAITS or calls_out(position.path))


@lru_cache(4096)  # many ranks share few paths
def _updates(path: tuple[Frame, ...]) -> bool:
    return weight_update(user_frames(path)) is not None


def _takes_part(server: Component) -> bool:
    """A thread of the engine is in the update, too."""
    stacks = [*server.stacks, *server.children]
    return any(weight_update(t.frames) for stack in stacks for t in stack.threads)
