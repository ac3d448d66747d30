"""A file system that does not answer: all ranks blocked by the kernel, or heartbeats unwritten."""

import re
from collections.abc import Sequence

from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.model import Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.rules_stacks import OUTSIDE, places_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.records import Stack

# Where a heartbeat's thread calls the file system, as its frames name it (monitor/heartbeat.py).
HEARTBEAT_FILE, HEARTBEAT_WRITE = "shakedown/monitor/heartbeat.py", "_write"


def all_blocked(s: Situation) -> Hypothesis | None:
    """All ranks in uninterruptible sleep, and none moved meanwhile.

    A process that only reads is in it for moments: twice at the same line is no moment.
    """
    # One rank alone in D state is the outsider rule's, which names it.
    if len(s.alive) < 2 or set(s.alive) != s.expected_ranks or s.moving:
        return None
    states = [state for r in s.alive if (state := s.ranks[r].state)]
    blocked = [state for state in states if state.state == "D"]
    if len(blocked) < len(s.alive) or not all(_seen_twice(s.ranks[r]) for r in s.alive):
        return None
    at = s.positions[s.alive[0]].where
    return Hypothesis(
        "storage",
        f"{name_ranks(s.alive)} are all blocked in the kernel ({blocked[0].wchan or 'D state'}, "
        f"{at}), the same in every sample: what they share, not one of them",
        victims=s.alive,
        confidence=0.7,
        evidence=[*[state.place for state in blocked[:4]], *places_of(s, s.alive, 2)],
        needed=["the mount's own state: `dmesg` and the file system's client log of one node"],
        remedy=OUTSIDE["storage"][2],
        blame="environment",
    )


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
    return Hypothesis(
        "storage",
        f"{name_ranks(blocked)} {verb(blocked, 'is', 'are')} blocked in the kernel ({wchan})"
        + (f" on {', '.join(sorted(hosts)[:4])}" if hosts else "")
        + (f": {told[0].text}" if told else ""),
        ranks=blocked,
        nodes=sorted(hosts) if len(hosts) == 1 else [],
        victims=sorted(set(s.ranks) - set(blocked)),
        confidence=0.85 if told else 0.7,
        evidence=[*[e.place for e in told[:3]], *places_of(s, blocked, 3)],
        needed=[] if told else ["the kernel log (`dmesg`) of the node"],
        remedy=OUTSIDE["storage"][2],
        blame="environment",
    )


def heartbeat_blocked(s: Situation) -> Hypothesis | None:
    """A rank seems to stand still and works: only the thread that writes its heartbeat stands."""
    blocked = _blocked_heartbeats(s)
    if not blocked or not all(_moves(component) for component in blocked):
        return None
    return _heartbeat_storage(s, blocked, ", while it goes on itself", confidence=0.9)


def heartbeat_and_rank_blocked(s: Situation) -> Hypothesis | None:
    """The rank stands as well: perhaps in its log or its data, on the same file system."""
    blocked = _blocked_heartbeats(s)
    return _heartbeat_storage(s, blocked, "", confidence=0.6) if blocked else None


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


def _moves(component: ComponentFacts) -> bool:
    return len({path_key(st.main.frames) for st in component.stacks if st.main}) > 1


def _heartbeat_storage(
    s: Situation, blocked: Sequence[ComponentFacts], more: str, *, confidence: float
) -> Hypothesis:
    """The nodes are named where others have no such trouble; else it is the file system's."""
    first, hosts = blocked[0], {c.host for c in blocked} - {""}
    others = {c.host for c in [*s.ranks.values(), *s.facts.roles.values()]} - hosts - {""}
    at = f" on {first.host}" if first.host else ""
    also = f"; so do {len(blocked) - 1} more" if len(blocked) > 1 else ""
    return Hypothesis(
        "storage",
        f"the thread of {first.name}{at} that writes its heartbeat stands in a call of the file "
        f"system in every sample{more}{also}",
        nodes=sorted(hosts) if others and len(hosts) <= len(others) else [],
        confidence=confidence,
        evidence=[c.stacks[-1].place for c in blocked[:6]],
        remedy="see whether the file system of the results folder answers on that node and has "
        "room: df, dmesg, mount",
        blame="environment",
    )


def _seen_twice(component: ComponentFacts) -> bool:
    """Two samples that agree: of the stack, or of the state in the kernel."""
    paths = {st.sample: path_key(st.main.frames) for st in component.stacks if st.main}
    states = {row.sample: (row.state, row.wchan) for row in component.states}
    return any(len(rows) > 1 and len(set(rows.values())) == 1 for rows in (paths, states))
