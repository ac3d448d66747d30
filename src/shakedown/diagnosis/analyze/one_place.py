"""Places alone, as stacks show them: who stands where, and what it leaves open."""

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.classes import user_key, waiting_threads
from shakedown.diagnosis.analyze.differ import describe
from shakedown.diagnosis.analyze.edges import lone_group
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.position import Position, in_nccl_enqueue, judge_path
from shakedown.diagnosis.analyze.raised import is_victims
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.analyze.storage import seen_twice
from shakedown.diagnosis.records import LogEvent
from shakedown.stacks.frames import is_user, library_calls, user_frames


def all_blocked(s: Situation) -> Hypothesis | None:
    """All ranks in uninterruptible sleep, and none moved meanwhile.

    A process that only reads is in it for moments: twice at the same line is no moment.
    """
    # One rank alone in D state is that of blocked.py, which names it.
    if len(s.alive) < 2 or set(s.alive) != s.expected_ranks or s.moving:
        return None
    states = [state for r in s.alive if (state := s.ranks[r].state)]
    blocked = [state for state in states if state.state == "D"]
    if len(blocked) < len(s.alive) or not all(seen_twice(s.ranks[r]) for r in s.alive):
        return None
    at = s.positions[s.alive[0]].where
    return conclude(
        s,
        "storage",
        f"{name_ranks(s.alive)} are all blocked in the kernel ({blocked[0].wchan or 'D state'}, "
        f"{at}), the same in every sample: what they share, not one of them",
        sure="likely",
        evidence=[*[state.place for state in blocked[:4]], *s.seen_at(s.alive, 2)],
        needed=["the mount's own state: `dmesg` and the file system's client log of one node"],
    )


_INTERNAL = re.compile(r"ncclInternalError")
_FOLLOWS = re.compile(
    r"closed by remote peer|socketProgress|ncclSystemError|unhandled system error"
)
_TRANSPORT = re.compile(
    r"NCCL WARN .{0,80}(?:NET/|IB |Net |[Ss]ocket|ibv_|timed out)|^ncclSocket|from peer|[Cc]onnect"
)


def told_nccl(s: Situation) -> Hypothesis | None:
    """NCCL itself reported an error: an internal one, or one of the system and the network.

    The rank that logged it is where it surfaced, not the one that caused it.
    """
    found: list[tuple[int | None, LogEvent]]
    found = [(None, e) for e in s.facts.events if e.kind in ("nccl_error", "traceback")]
    found += [
        (r, e)
        for r, c in s.ranks.items()
        for e in c.events
        if e.kind in ("nccl_error", "traceback")
    ]
    rows = [(r, e) for r, e in found if e.kind == "nccl_error" or _INTERNAL.search(e.text)]
    # A peer that closed the connection ended first, for a reason of its own; what NCCL makes of it
    # tells no more.
    closed = any("closed by remote peer" in e.text for _, e in rows)
    if not any(not _FOLLOWS.search(e.text) if closed else True for _, e in rows):
        return None
    internal = [row for row in rows if _INTERNAL.search(row[1].text)]
    # An internal error says more than the errors of peers that follow from it, and less than what
    # a transport says itself.
    if any(_TRANSPORT.search(event.text) for _, event in rows):
        internal = []
    elif not internal:
        return None  # an error of the system: of its memory, its devices or its network
    rank, event = (internal or rows)[0]
    where = f"rank {rank}" if rank is not None else event.place.path
    what = "an internal error" if internal else "an error of the system or the network"
    node = "" if internal else _agreed([e for _, e in rows])
    return conclude(
        s,
        "nccl_internal" if internal else "network",
        f"NCCL reported {what} ({where}: {event.text})"
        + (f"; all such lines are {node}'s own, or of its peers about it" if node else ""),
        nodes=[node] if node else [],
        sure="likely" if node else "open",
        evidence=[e.place for _, e in (internal or rows)[:8]],
        needed=["NCCL_DEBUG=INFO logs of all ranks and NCCL's version", "`dmesg` of the nodes"],
    )


def _agreed(events: Sequence[LogEvent]) -> str:
    """The node that every line speaks of, as its own or as a peer, seen from two nodes at least."""
    rows = [e.detail for e in events if "node" in e.detail]
    told = [{str(row["node"]), str(row.get("peer", row["node"]))} for row in rows]
    common = set.intersection(*told) if told else set()
    seen_from = {str(row["node"]) for row in rows}
    return common.pop() if len(common) == 1 and len(seen_from) > 1 else ""


def different_paths(s: Situation) -> Hypothesis | None:
    """Pattern B from stacks alone: all wait, on different calls; who is wrong they do not say."""
    inside = [r for r in s.at("collective", "p2p") if not s.positions[r].cleanup]
    paths: dict[object, list[int]] = {}
    for rank in inside:
        path = s.positions[rank].path
        # Without lines of libraries: one call may be sampled at two lines inside torch.
        key = s.positions[rank].op, user_key(path), library_calls(path)
        paths.setdefault(key, []).append(rank)
    if len(paths) < 2:
        return None
    groups = sorted(paths.values(), key=lambda ranks: (len(ranks), ranks))
    told = "; ".join(f"{name_ranks(r)} in {s.positions[r[0]].where}" for r in groups[:4])
    cause: Cause = "conditional_collective" if _one_aside(s, groups) else "collective_mismatch"
    pipeline = _in_pipeline([s.positions[r] for r in inside])
    found = conclude(
        s,
        "pipeline_order" if pipeline else cause,
        f"ranks wait in different calls: {told}",
        sure="open",
        evidence=[p for ranks in groups[:4] for p in s.seen_at(ranks, 2)],
        needed=[
            "Flight Recorder dumps of all ranks: the calls before the hang tell which rank left "
            "the usual order",
        ],
    )
    return replace(found, cause_open=not pipeline)


def _one_aside(s: Situation, groups: Sequence[Sequence[int]]) -> bool:
    """One rank by itself on another way through the code than all others, three at least.

    Whether it is the one that is wrong stays open: the others may have left it behind.
    """
    if len(groups) != 2 or len(groups[0]) > 1 or len(groups[1]) < 3:
        return False
    # Who is in a barrier has come to an end that the others have not: no branch.
    ops = {s.positions[ranks[0]].op for ranks in groups}
    return not ops & {"barrier", "monitored_barrier"}


def _in_pipeline(positions: Sequence[Position]) -> bool:
    """Sends and receives alone, two of them sends; or all ranks inside a pipeline's schedule, some
    of them in a send or receive.
    """
    if all(any("p2p_communication" in f.file for f in p.path) for p in positions):
        return True
    if all(p.kind == "p2p" for p in positions):
        return sum("send" in p.op for p in positions) > 1
    below = all(any("pipelin" in f.file for f in p.path) for p in positions)
    return below and any(p.kind == "p2p" for p in positions)


def one_place(s: Situation) -> Hypothesis | None:
    """Pattern C: every rank waits in the same call and none is behind."""
    ranks = s.waiting
    if len(ranks) < 2 or len(ranks) < len(s.expected_ranks) or s.graph or not _one_call(s, ranks):
        return None
    native = [r for r in ranks if in_nccl_enqueue(s.ranks[r])]
    world = any(set(g.members) >= set(ranks) for g in s.facts.groups)
    names = [e for c in s.ranks.values() for e in c.events if e.kind == "nccl_error"]
    cause: Cause = "nccl_internal" if native else "network"
    # Dumps count calls and show that none is behind. Stacks cannot, and without the world size
    # a rank may be missing altogether.
    dumped = any(s.ranks[r].record for r in ranks)
    # Where the dumps show no open call, the one that all wait in is of a backend that keeps none.
    counted = dumped and any(v.pending for g in s.facts.groups for v in g.views.values())
    told = " and none is behind: the network or the library, not a branch"
    if native:
        told = " and none is behind: inside NCCL's enqueue"
    elif dumped and not counted:
        told = ", which is in no dump"
    looks = {stack.sample for r in ranks for stack in s.ranks[r].stacks}
    found = conclude(
        s,
        cause,
        f"all {len(ranks)} ranks wait in {_common_call(s, ranks[0])}{told}",
        sure="likely" if counted else "open",
        evidence=[*[e.place for e in names[:3]], *s.seen_at(ranks)],
        needed=[
            *([] if world else ["the world size: a rank of which no file tells may be missing"]),
            "NCCL_DEBUG=INFO logs, link error counters, and a second sample after a minute",
        ],
    )
    return replace(found, cause_open=not (native or counted or (len(looks) > 1 and not dumped)))


def _one_call(s: Situation, ranks: Sequence[int]) -> bool:
    """Whether it is one collective that all wait in, as far as anything tells."""
    # One that could not be read, among processes that nobody counted, may be the one.
    if s.facts.unread and not s.facts.world:
        return False
    # Each waits for another one's send: that all stand in one line does not tell that all came.
    if any(s.positions[r].kind == "p2p" for r in ranks):
        return False
    if len({s.positions[r].op for r in ranks if not s.positions[r].path}) > 1:
        return False
    # `work.wait()` stands at one line for every call.
    if all(s.positions[r].op in ("wait", "_wait", "unknown", "") for r in ranks) and not any(
        s.ranks[r].record for r in ranks
    ):
        return False
    # Different calls of one group that all are to be in at once: the dumps are of several moments.
    if any(len({v.pending for v in g.views.values() if v.pending}) > 1 for g in s.facts.groups):
        return False
    # Lines of watchdogs show that all wait, not that none is behind.
    return any(c.stacks or (c.record and c.record.operations) for c in s.ranks.values())


def _common_call(s: Situation, rank: int) -> str:
    if s.positions[rank].op and s.positions[rank].path:
        return s.positions[rank].where
    for group in s.facts.groups:
        view = group.views.get(rank)
        op = view.operations.get(view.pending) if view and view.pending else None
        if op is not None:
            return f"{describe(op)} (number {op.seq} of {group.label})"
    return "the same collective"


def two_threads(s: Situation) -> Hypothesis | None:
    """Two threads of one process inside collectives: their order differs between ranks."""
    ranks = [r for r in s.alive if _threads_inside(s, r) > 1 and not _own_groups(s, r)]
    if not ranks:
        return None
    return conclude(
        s,
        "two_threads_one_group",
        f"{name_ranks(ranks)} {verb(ranks, 'waits', 'wait')} in collectives from two "
        "threads at once",
        # Nobody is named: stacks do not show whose order is wrong.
        sure="open",
        evidence=s.seen_at(ranks),
        needed=["Flight Recorder dumps, for the order of the two threads' calls on each rank"],
    )


def _own_groups(s: Situation, rank: int) -> bool:
    """The open calls of the dump are on one group each: every thread has its own."""
    record = s.ranks[rank].record
    groups = [op.group for op in record.operations if not op.done] if record else []
    return len(groups) > 1 and len(set(groups)) == len(groups)


def _threads_inside(s: Situation, rank: int) -> int:
    stack = s.ranks[rank].stack
    path = stack.main.frames if stack and stack.main else ()
    # Two main threads: the text is of several processes, which nothing tells apart.
    if stack and sum(t.frames[0].function == "<module>" for t in stack.threads if t.frames) > 1:
        return 0
    # In a backward pass the main thread only waits for those that run it.
    backward = path and path[-1].function in ("_engine_run_backward", "run_backward", "backward")
    main = judge_path(path).kind in ("collective", "p2p") and not backward
    return main + len(waiting_threads(s.ranks[rank]))


_SENDS = frozenset({"send", "isend", "send_object_list"})
_RECEIVES = frozenset({"recv", "irecv", "recv_object_list"})


def one_way(s: Situation) -> Hypothesis | None:
    """From stacks: every rank sends, or every rank receives, so nobody takes the other part."""
    ranks = s.at("p2p")
    if len(ranks) < 2 or set(ranks) != s.expected_ranks:
        return None
    calls = {s.positions[r].op for r in ranks}
    if not calls <= _SENDS and not calls <= _RECEIVES:
        return None
    what = "send" if calls <= _SENDS else "receive"
    return conclude(
        s,
        "pipeline_order",
        f"all {len(ranks)} ranks {what} ({s.positions[ranks[0]].where}) and nobody takes the "
        "other part",
        sure="likely",
        evidence=s.seen_at(ranks),
        needed=["the order in which the schedule means the ranks to send and receive"],
        remedy="post both in one batch (batch_isend_irecv), or let every second rank receive first",
    )


# Code of a data set, of which ordinary steps make no collective.
_DATA_CODE = re.compile(
    r"^(?:__getitem__|__iter__|__next__|collate\w*|\w*(?:build|make|prepare|create)_\w*data\w*)$"
)


def lone_call_from_data(s: Situation) -> Hypothesis | None:
    """One rank in a collective that its data code called, while all others wait for their data."""
    ranks = [r for r in s.at("collective") if s.positions[r].path]
    loading = s.at("dataloader")
    if len(ranks) != 1 or len(loading) < 2 or len(loading) + 1 < len(s.alive):
        return None
    position = s.positions[ranks[0]]
    users = user_frames(position.path)
    if not any(_DATA_CODE.match(f.function) or "/data" in f.file for f in users[-3:]):
        return None
    return conclude(
        s,
        "conditional_collective",
        f"{name_ranks(ranks)} waits alone in {position.where}, which its data code calls, while "
        f"{name_ranks(loading)} wait for their data loaders",
        ranks=ranks,
        sure="seen",
        evidence=[*s.seen_at(ranks), *s.seen_at(loading, 3)],
        waits=[Block(ranks, loading, f"entered {position.op}")],
        remedy="take the collective out of the data code, or let every rank call it",
    )


def makes_a_lone_group(s: Situation) -> Hypothesis | None:
    """Few ranks make a process group, in which all have to take part, and the others do not."""
    inside = s.at("init")
    if not lone_group(s, inside):
        return None
    outside = sorted(set(s.waiting).difference(inside))
    return conclude(
        s,
        "conditional_collective",
        f"{name_ranks(inside)} {verb(inside, 'makes', 'make')} a process group "
        f"({s.positions[inside[0]].where}), in which all have to take part, while "
        f"{name_ranks(outside)} {verb(outside, 'waits', 'wait')} in {s.waits_in(outside)}",
        ranks=inside,
        sure="likely",
        evidence=[*s.seen_at(inside), *s.seen_at(outside, 3)],
        waits=[Block(inside, outside, "entered the group's barrier")],
        remedy="make the group on every rank, or on none",
    )


def unknown(s: Situation) -> Hypothesis:
    """What was seen, and what would settle it."""
    missing = sorted(s.expected_ranks - set(s.ranks))
    without_stack = [r for r in s.alive if not s.positions[r].path]
    without_dump = [r for r in s.alive if s.ranks[r].record is None]
    needed = []
    if missing:
        needed.append(f"any evidence of {name_ranks(missing)}")
    if without_stack:
        needed.append(f"stacks of {name_ranks(without_stack)} (`shakedown hang collect`)")
    if without_dump:
        needed.append(f"Flight Recorder dumps of {name_ranks(without_dump)}")
    ended = not s.alive if s.ranks else _ended_by_an_error(s)
    if _looked_at(s) and not s.moving:
        needed.append("a second sample, 5 s or more after the first")
    elif not ended and not without_stack:
        needed.append("stacks of all processes while the job stands (`shakedown hang collect`)")
    if s.ranks:
        needed.append("the logs of all ranks")
    if _only_computes(s):
        return conclude(
            s,
            "unknown",
            "every process computes in code of its own, and none waits for another one: a long "
            "step or an endless loop, which nothing tells apart",
            sure="open",
            state="unknown",
            evidence=s.seen_at(s.alive),
            needed=["what it prints after a step, or how long a step takes", *needed],
        )
    return conclude(
        s,
        "unknown",
        _seen(s, ended=ended),
        sure="open",
        state="exited" if ended else "hung" if s.stuck or s.graph else "unknown",
        needed=needed,
    )


def _looked_at(s: Situation) -> bool:
    """Whether a process was looked at, which a second look can be compared with."""
    components = [*s.ranks.values(), *s.facts.roles.values()]
    placed = any(c.stacks or c.beats or c.states for c in components)
    return placed or bool(s.facts.unplaced or s.facts.processes)


def _ended_by_an_error(s: Situation) -> bool:
    """A log has an exception that nothing came after, and no process was looked at."""
    rows = (e for e in s.facts.events if e.kind == "traceback" and not is_victims(e))
    raised = {e.text for e in rows}
    return not _looked_at(s) and any(end.last in raised for end in s.facts.ends)


def _only_computes(s: Situation) -> bool:
    """Suspected from outside alone, though all are on a CPU in lines of their own code.

    Who waits for a GPU or in NCCL, and keeps a CPU busy, stands in a library.
    """
    places = [s.positions[r] for r in s.alive]
    busy = all(p.kind == "busy" and p.path and is_user(p.path[-1]) for p in places)
    return s.suspected and bool(places) and busy


NO_CAUSE = "the evidence names no cause"


def _seen(s: Situation, *, ended: bool) -> str:
    """How far the evidence goes."""
    if s.facts.outcome is not None and s.facts.outcome.done:
        return "; ".join([s.facts.outcome.sentence, *_last_of(s)])
    unread = "".join([f"; node {n.node} was {n.state}" for n in s.facts.nodes if n.unread][:4])
    if not s.ranks:
        return f"no rank was seen{unread}; {NO_CAUSE}"
    kind = "process" if s.facts.guessed else "rank"
    many = f"{kind}{'es' if s.facts.guessed else 's'}"
    count = f"{len(s.ranks)} {f'{kind} was' if len(s.ranks) == 1 else f'{many} were'} seen"
    if ended:
        return f"{count} and all ended; which went first is not known"
    silent = [r for r in s.blockers if s.has_no_evidence(r)]
    if silent:
        waiters = sorted(n for n in s.graph.waiters if isinstance(n, int))
        return (
            f"{name_ranks(waiters)} {verb(waiters, 'waits', 'wait')} for {name_ranks(silent)}, of "
            f"which no dump tells; whether {verb(silent, 'it is', 'they are')} missing or only "
            f"{verb(silent, 'its', 'their')} files are lost is not known"
        )
    absent = sorted(s.expected_ranks - set(s.ranks))
    if absent:
        return f"{count}, nothing of {name_ranks(absent)}{unread}; {NO_CAUSE}"
    return f"{count}{unread}; {NO_CAUSE}"


def _last_of(s: Situation) -> list[str]:
    """Who was still there, or how ranks ended; a launcher ends the others by SIGTERM."""
    if left := [r for r, c in s.ranks.items() if c.states and r not in s.dead]:
        return [f"{name_ranks(left)} {verb(left, 'was', 'were')} still there"]
    codes = {r: code for r, c in s.ranks.items() if (code := c.exit_code)}
    return [
        f"rank {r} ended by {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        for r, code in sorted(codes.items())
        if code != -signal.SIGTERM
    ][:4]
