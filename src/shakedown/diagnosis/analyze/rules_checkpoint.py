"""A checkpoint that a thread writes while the main thread waits for it."""

import re
from functools import lru_cache

from shakedown.diagnosis.analyze.model import Edge, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.position import judge_path
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import Frame, Stack, Thread

_FILE = re.compile(r"checkpoint\w*(?:/\w+)?\.py$")  # a module, or one of a package
_WAITS = re.compile(r"^(?:wait|join|finalize|finish|flush|result|maybe_wait\w*)$")
_WRITES = re.compile(r"^(?:_?write\w*|_?save\w*|sync_file|fsync|publish\w*)$")
_THREAD = re.compile(r"^checkpoint", re.I)


@lru_cache(4096)  # many ranks share few paths
def _waits(path: tuple[Frame, ...]) -> Frame | None:
    """The frame in which a main thread waits for the writing of its checkpoint."""
    return next((f for f in path if _FILE.search(f.file) and _WAITS.match(f.function)), None)


def _writer(stack: Stack) -> Thread | None:
    for thread in stack.threads:
        if thread is stack.main or not thread.frames:
            continue
        inside = any(_FILE.search(f.file) and _WRITES.match(f.function) for f in thread.frames)
        stored = judge_path(thread.frames).kind == "storage"
        if inside or (stored and _THREAD.match(thread.name)):
            return thread
    return None


def _stuck(component: ComponentFacts) -> tuple[Stack, Thread] | None:
    """In every sample the main thread waits and the other one writes."""
    usable = [st for st in component.stacks if st.main and st.main.frames]
    found = [(st, w) for st in usable if st.main and _waits(st.main.frames) and (w := _writer(st))]
    samples = {st.sample for st in usable}
    if not found or {st.sample for st, _ in found} != samples:
        return None
    return max(found, key=lambda row: row[0].sample)


def checkpoint_thread(s: Situation) -> Hypothesis | None:
    """All wait for a checkpoint; the ranks whose thread still writes are where the disk stands."""
    writing = {r: row for r, c in s.ranks.items() if (row := _stuck(c)) is not None}
    waiting = [r for r in s.alive if s.positions[r].path and _waits(s.positions[r].path)]
    # A rank that ended or was stopped explains why the others wait; so does one that stands
    # elsewhere.
    if not writing or len(waiting) < len(s.alive) or s.dead or s.at("stopped"):
        return None
    if any(r in s.moving and len({b.sample for b in s.ranks[r].beats}) > 1 for r in s.ranks):
        return None  # steps go on: slow, not hung
    # Where most ranks still write it is the storage that they share.
    few = 2 * len(writing) <= len(s.alive) and s.expected_ranks == set(s.ranks)
    named = sorted(writing) if few else []
    _, thread = writing[min(writing)]
    twice = len({st.sample for st in s.ranks[min(writing)].stacks}) > 1
    leaf = thread.frames[-1]
    return Hypothesis(
        "storage",
        f"{name_ranks(list(writing))} {verb(list(writing), 'writes', 'write')} a checkpoint in a "
        f"thread that does not end ({leaf}), while {name_ranks(waiting)} "
        f"{verb(waiting, 'waits', 'wait')} for it",
        ranks=named,
        victims=sorted(set(s.ranks) - set(named)),
        confidence=0.85 if twice else 0.7,
        evidence=[st.place for st, _ in list(writing.values())[:6]],
        edges=[
            Edge(f"rank {a}", f"rank {b}", "checkpoint not written")
            for a in waiting
            for b in sorted(writing)
            if a != b
        ][:200],
        needed=[] if twice else ["a second sample: a slow disk looks like a stuck one in one"],
        remedy="see whether the file system of the checkpoints answers: df, dmesg, mount",
        blame="environment",
    )
