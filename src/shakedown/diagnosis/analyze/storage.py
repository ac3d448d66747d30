"""Question 4 of file systems: checkpoints that are not written, ranks and heartbeats blocked."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from shakedown.diagnosis.analyze.causes import CONFIDENCE, TABLE, Strength, conclude
from shakedown.diagnosis.analyze.classes import paths_seen
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.position import judge_path
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import LogEvent, Stack, Thread
from shakedown.stacks.frames import Frame

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
    return conclude(
        s,
        "storage",
        f"{name_ranks(list(writing))} {verb(list(writing), 'writes', 'write')} a checkpoint in a "
        f"thread that does not end ({leaf}), while {name_ranks(waiting)} "
        f"{verb(waiting, 'waits', 'wait')} for it",
        ranks=named,
        sure="seen" if twice else "likely",
        evidence=[st.place for st, _ in list(writing.values())[:6]],
        waits=[
            Block([r], [w for w in writing if w != r], "written the checkpoint") for r in waiting
        ],
        needed=[] if twice else ["a second sample: a slow disk looks like a stuck one in one"],
        remedy="see whether the file system of the checkpoints answers: df, dmesg, mount",
    )


# Where a heartbeat's thread calls the file system, as its frames name it (monitor/heartbeat.py).
HEARTBEAT_FILE, HEARTBEAT_WRITE = "shakedown/monitor/heartbeat.py", "_write"


# Kernel functions of network and parallel file systems, and of waiting for a disk.
_FILE_SYSTEM = re.compile(
    r"^(?:nfs|rpc_|ll_|cl_|osc_|ptlrpc|lustre|ceph|fuse|gpfs|cxi|xfs|ext4|jbd2|io_schedule|wait_on_page"
    r"|folio_wait|do_truncate|__lock_page)"
)


def blocked_on_a_node(s: Situation) -> Hypothesis | None:
    """Few ranks in a file system's uninterruptible sleep, without a stack that tells more.

    The kernel's own log names the node, where it is given.
    """
    blocked = [
        r
        for r, c in s.ranks.items()
        if (state := c.state) and state.state == "D" and _FILE_SYSTEM.match(state.wchan)
    ]
    if (
        not blocked
        or len(blocked) == len(s.expected_ranks)
        or any(s.positions[r].path for r in blocked)
    ):
        return None
    told = [e for e in s.facts.events if e.kind == "storage" and e.who.host]
    hosts = {e.who.host for e in told} | {s.ranks[r].host for r in blocked} - {""}
    first = s.ranks[blocked[0]].state
    wchan = first.wchan if first else ""
    return conclude(
        s,
        "storage",
        f"{name_ranks(blocked)} {verb(blocked, 'is', 'are')} blocked in the kernel ({wchan})"
        + (f" on {', '.join(sorted(hosts)[:4])}" if hosts else "")
        + (f": {told[0].text}" if told else ""),
        ranks=blocked,
        nodes=sorted(hosts) if len(hosts) == 1 else [],
        sure="seen" if told else "likely",
        evidence=[*[e.place for e in told[:3]], *s.seen_at(blocked, 3)],
        needed=[] if told else ["the kernel log (`dmesg`) of the node"],
    )


# Words of a file system, or of a stream of data, that does not answer.
_NO_ANSWER = re.compile(
    r"not responding|blocked for more than|evicted|Input/output error|disconnected from remote",
    re.I,
)


def explained(s: Situation, chosen: Hypothesis) -> Hypothesis:
    """Ranks that have not come, whose own log or node tells of storage: that holds them."""
    if chosen.cause != "missing_rank" or not chosen.ranks or set(chosen.ranks) & set(s.dead):
        return chosen
    found = told_of(s, chosen.ranks)
    if not found:
        return chosen
    cause: Cause = "dataloader" if "remote data" in found[0].text else "storage"
    row = TABLE[cause]
    return replace(
        chosen,
        cause=cause,
        sentence=f"{chosen.sentence}; {found[0].text}",
        confidence=min(chosen.confidence, CONFIDENCE["likely"]),
        evidence=[*chosen.evidence[:6], *[e.place for e in found[:2]]],
        remedy=row.remedy,
        blame=row.blame,
    )


def told_of(s: Situation, ranks: Collection[int]) -> list[LogEvent]:
    """Events of storage in these ranks' own logs, or in the kernel's log of one node."""
    known = [s.ranks[r] for r in ranks if r in s.ranks]
    own = [e for c in known for e in c.events]
    kernels = {end.place.path for end in s.facts.ends if end.kernel}
    hosts = {c.host for c in known} - {""}
    loose = [e for e in s.facts.events if e.place.path in kernels]
    loose = [e for e in loose if e.kind == "storage" and _NO_ANSWER.search(e.text)]
    # Where no node of the ranks is known the one node that complains may be theirs.
    theirs = [e for e in loose if not hosts or e.who.host in hosts | {""}]
    theirs = theirs if len({e.who.host for e in theirs}) == 1 else []
    return [e for e in own if e.kind == "storage" and _NO_ANSWER.search(e.text)] + theirs


def heartbeat_blocked(s: Situation) -> Hypothesis | None:
    """A rank seems to stand still and works: only the thread that writes its heartbeat stands."""
    blocked = _blocked_heartbeats(s)
    if not blocked or not all(len(set(paths_seen(part))) > 1 for part in blocked):
        return None
    return _heartbeat_storage(s, blocked, ", while it goes on itself", sure="told")


def heartbeat_and_rank_blocked(s: Situation) -> Hypothesis | None:
    """The rank stands as well: perhaps in its log or its data, on the same file system."""
    blocked = _blocked_heartbeats(s)
    return _heartbeat_storage(s, blocked, "", sure="open") if blocked else None


def _heartbeat_storage(
    s: Situation, blocked: Sequence[ComponentFacts], more: str, *, sure: Strength
) -> Hypothesis:
    """The nodes are named where others have no such trouble; else it is the file system's."""
    first, hosts = blocked[0], {c.host for c in blocked} - {""}
    others = {c.host for c in [*s.ranks.values(), *s.facts.roles.values()]} - hosts - {""}
    at = f" on {first.host}" if first.host else ""
    also = f"; so do {len(blocked) - 1} more" if len(blocked) > 1 else ""
    return conclude(
        s,
        "storage",
        f"the thread of {first.name}{at} that writes its heartbeat stands in a call of the file "
        f"system in every sample{more}{also}",
        nodes=sorted(hosts) if others and len(hosts) <= len(others) else [],
        sure=sure,
        evidence=[c.stacks[-1].place for c in blocked[:6]],
        remedy="see whether the file system of the results folder answers on that node and has "
        "room: df, dmesg, mount",
    )


def _blocked_heartbeats(s: Situation) -> list[ComponentFacts]:
    """Components whose heartbeat thread stood in a call of the file system in every sample."""
    if s.dead or s.at("stopped"):
        return []
    parts = [*s.ranks.values(), *s.facts.roles.values()]
    # In one sample every heartbeat may be caught while it is written.
    return [part for part in parts if len(part.stacks) > 1 and all(map(_writes, part.stacks))]


def _writes(stack: Stack) -> bool:
    """Its heartbeat thread is inside the one function that calls the file system."""
    return any(
        frame.function == HEARTBEAT_WRITE and frame.file.endswith(HEARTBEAT_FILE)
        for thread in stack.threads
        for frame in thread.frames
    )


def seen_twice(component: ComponentFacts) -> bool:
    """Two samples that agree: of the stack, or of the state in the kernel."""
    states = {row.sample: (row.state, row.wchan) for row in component.states}
    looks: list[list[tuple[object, ...]]] = [paths_seen(component), list(states.values())]
    return any(len(rows) > 1 and len(set(rows)) == 1 for rows in looks)
