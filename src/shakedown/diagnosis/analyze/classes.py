"""Equivalence classes of ranks: the same full call path, never the same leaf alone."""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from shakedown.diagnosis.analyze.model import RankClass
from shakedown.diagnosis.analyze.position import Position, judge_path
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.stacks.frames import Frame, python_frames, user_frames

Key = tuple[object, ...]


def frame_key(frame: Frame) -> tuple[str, str, int]:
    """Tools shorten file names differently and only some prefix classes."""
    return frame.function, frame.file.rsplit("/", 1)[-1], frame.line


@lru_cache(4096)  # ranks of a job share few paths
def path_key(path: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """A call path as a key: of a process that spins in a driver each look shows other addresses."""
    return tuple(map(frame_key, python_frames(path) or path))


def paths_seen(component: ComponentFacts) -> list[Key]:
    """The main thread's path at each look."""
    found = {st.sample: path_key(st.main.frames) for st in component.stacks if st.main}
    return list(found.values())


@lru_cache(4096)
def user_key(path: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """The user's own frames of a call path as a key."""
    return tuple(map(frame_key, user_frames(path)))


def waiting_threads(component: ComponentFacts) -> list[tuple[Frame, ...]]:
    """Paths of further threads that are inside a collective: they tell classes apart."""
    stack = component.stack
    if stack is None or len(stack.threads) < 2:
        return []
    main = stack.main
    others = [t.frames for t in stack.threads if t is not main]
    return [p for p in others if judge_path(p).kind in ("collective", "p2p")]


def rank_classes(
    ranks: Mapping[int, ComponentFacts], positions: Mapping[int, Position]
) -> list[RankClass]:
    """Classes by size, largest first. Ranks without a stack form classes by their state."""
    members: dict[Key, list[int]] = defaultdict(list)
    for rank, component in sorted(ranks.items()):
        position = positions[rank]
        threads = tuple(sorted(map(path_key, waiting_threads(component))))
        # A stopped process keeps its stack: on the same path as others it does not wait as they do.
        key: Key = (path_key(position.path), threads, position.kind in ("dead", "stopped"))
        members[key if position.path else ("without a stack", position.kind)].append(rank)
    classes = []
    for found in members.values():
        position = positions[found[0]]
        waiting = position.op or position.kind
        if position.kind in ("stopped", "dead"):
            waiting = position.kind
        classes.append(RankClass(tuple(found), tuple(map(str, position.path)), waiting))
    return sorted(classes, key=lambda row: (-len(row.ranks), row.ranks))
