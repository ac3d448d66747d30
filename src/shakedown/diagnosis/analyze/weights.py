"""Question 4 of weights that trainers hand over and nobody takes, seen in stacks alone.

Ranks that wait in it are victims: nothing here ever names one.
"""

import re
from functools import lru_cache

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.stacks.frames import Frame, is_user, user_frames
from shakedown.stacks.waits import awaits_result, calls_out, weight_update

_SERVER = "inference"
_WAITS = frozenset({"collective", "p2p", "init"})


def weights_by_stack(s: Situation) -> Hypothesis | None:
    """Every rank waits and some of them in the hand-over of weights to an inference engine."""
    inside = [r for r in s.alive if _hands_over(s, r)]
    others = [r for r in s.alive if r not in inside]
    # Each of these explains the wait without the engine.
    if not inside or s.dead or s.calls.roots or s.partings:
        return None
    if any(s.positions[r].kind not in _WAITS for r in others):
        return None  # who stands elsewhere explains it better
    server = s.facts.roles.get(_SERVER)
    if server is None and len(others) > len(inside) and not _asks(s, inside):
        return None  # the others may be expected in it: ranks alone do not tell
    if server is not None and _takes_part(server):
        return None if others else _both_inside(s, inside, server)
    if server is None and all(_may_be_own(s.positions[r].path) for r in inside):
        return None
    known = server is not None and bool(server.path)
    frame = _frame_of(s.positions[inside[0]].path)
    seen = ""
    if server is not None and server.path:
        seen = f", while the inference engine is in {(user_frames(server.path) or server.path)[-1]}"
    return conclude(
        s,
        "weight_sync_one_sided",
        f"{name_ranks(inside)} {verb(inside, 'waits', 'wait')} in the weight update "
        f"({frame}){seen}",
        roles=[_SERVER] if known else [],
        sure="seen" if known else "open",
        evidence=[*s.seen_at(inside), *([st.place] if server and (st := server.stack) else [])],
        needed=[] if known else ["log and stacks of the inference engine"],
        waits=[Block(inside, [_SERVER], "taken the weights")],
    )


# Trainers also broadcast weights among themselves, when they begin.
_AMONG = re.compile(r"(?:^|_)(?:broadcast|stream)_(?:\w{1,8}_)?weights?(?:_|$)")


def _may_be_own(path: tuple[Frame, ...]) -> bool:
    frame = _frame_of(path)
    return frame is not None and _AMONG.search(frame.function) is not None


def _both_inside(s: Situation, inside: list[int], server: ComponentFacts) -> Hypothesis:
    """Both sides take part: one rank sends and the others wait for it, which is no mismatch."""
    return conclude(
        s,
        "network",
        f"{name_ranks(inside)} and the inference engine are all in the weight update, which does "
        "not end: neither side is missing",
        sure="open",
        evidence=[*s.seen_at(inside), *([st.place] if (st := server.stack) else [])],
        needed=[
            "Flight Recorder dumps of trainer and engine: the update's group, its size and order",
            "NCCL_DEBUG=INFO logs of both sides",
        ],
    )


def _asks(s: Situation, ranks: list[int]) -> bool:
    """One of them waits for another process's answer."""
    return any(_asks_for(s.positions[r].path) for r in ranks)


def _asks_for(path: tuple[Frame, ...]) -> bool:
    return calls_out(path) or awaits_result(path)


def _hands_over(s: Situation, rank: int) -> bool:
    position = s.positions[rank]
    waits = position.kind in _WAITS or _asks_for(position.path) or _polls(position.path)
    return waits and _frame_of(position.path) is not None


# `_wait_for_nccl_ready`, `sync_wait_for_path`: of a file that the other side is to write
_POLL = re.compile(r"(?:^|_)(?:wait|poll)(?:_|$)")


def _polls(path: tuple[Frame, ...]) -> bool:
    """The user's own innermost function waits by its name."""
    users = user_frames(path)
    return bool(users) and _POLL.search(users[-1].function) is not None


# Libraries whose own code hands weights over.
_TRAINERS = re.compile(r"(?:^|/)trl/")


@lru_cache(4096)  # many ranks share few paths
def _frame_of(path: tuple[Frame, ...]) -> Frame | None:
    return weight_update([f for f in path if is_user(f) or _TRAINERS.search(f.file)])


def _takes_part(server: ComponentFacts) -> bool:
    """A thread of the engine is in the update, too."""
    stacks = [*server.stacks, *server.children]
    return any(weight_update(t.frames) for stack in stacks for t in stack.threads)
