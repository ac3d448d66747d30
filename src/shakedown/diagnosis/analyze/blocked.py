"""Question 4: who blocks? The roots of the wait-for graph, and what each of them does."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePath

from shakedown.diagnosis.analyze.causes import Strength, conclude
from shakedown.diagnosis.analyze.edges import ELSEWHERE
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.places import WAITING, bar_of
from shakedown.diagnosis.analyze.position import Position
from shakedown.diagnosis.analyze.raised import OWN, root_exception
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.analyze.storage import told_of
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.read.reports import READY
from shakedown.diagnosis.records import SourceRef
from shakedown.stacks.frames import Frame, user_frames
from shakedown.stacks.waits import asks_to_generate, awaits_result


def blocked_by_ranks(s: Situation) -> Hypothesis | None:
    """Ranks that others wait for and that wait for nobody: where they stand says why."""
    silent = [r for r in s.blockers if s.has_no_evidence(r)]
    # A rank that waits in a call is no root, though nothing shows for whom it waits.
    seen = [r for r in s.blockers if r not in silent and s.positions[r].kind not in WAITING]
    starts = s.at("init") and any(s.positions[r].kind == "init" for r in _waiters(s, s.blockers))
    kinds = {s.positions[r].kind for r in seen}
    kind = next((k for k in ELSEWHERE if k in kinds and not starts), None)
    named = [r for r in seen if kind in (None, s.positions[r].kind)] or _sole(s, silent)
    named = [r for r in named if not _timed_out_alike(s, r, _waiters(s, named))]
    first, waiters = s.graph.first_for(named), _waiters(s, named)
    if first is None or _many(s, named, waiters):
        return None
    if all(_timed_out_apart(s, r, waiters) for r in named):
        return _parted(s, named, waiters)
    if starts:
        return _not_joined(s, named, waiters)
    return _not_come(s, named, waiters, silent) if kind is None else _elsewhere(s, named, waiters)


def _waiters(s: Situation, ranks: Collection[int]) -> list[int]:
    return sorted(node for node in s.graph.waiters_of(ranks) if isinstance(node, int))


def _timed_out_alike(s: Situation, rank: int, waiters: Collection[int]) -> bool:
    """Its own log reports a time-out at the number at which the others wait: it waits as they do.

    Dumps and logs do not always call a group alike.
    """
    views = [g.views[r] for g in s.facts.groups for r in waiters if r in g.views]
    numbers = {view.pending for view in views if view.pending}
    events = s.ranks[rank].events if rank in s.ranks else []
    return any(e.kind == "timeout" and e.detail.get("seq") in numbers for e in events)


def _timed_out_apart(s: Situation, rank: int, waiters: Collection[int]) -> bool:
    """Its own watchdog gave up a call of the group in which the others wait at another number."""
    events = s.ranks[rank].events if rank in s.ranks else []
    gave_up = any(e.kind == "timeout" and "op" in e.detail for e in events)
    views = [g.views for g in s.facts.groups if rank in g.views and g.views[rank].pending]
    return gave_up and any(v[r].pending for v in views for r in waiters if r in v)


def _parted(s: Situation, named: list[int], waiters: list[int]) -> Hypothesis:
    return conclude(
        s,
        # Behind, or in other calls before: the numbers alone do not tell.
        "unknown",
        f"{name_ranks(named)} and {name_ranks(waiters)} timed out at different numbers of one "
        "group: they were in different calls before, or some are behind",
        sure="open",
        evidence=s.recorded_at([*named, *waiters]),
        needed=["Flight Recorder dumps of all ranks: the calls before tell where they parted"],
    )


def _sole(s: Situation, silent: list[int]) -> list[int]:
    """The one rank of which nothing is known, where all others left evidence that speaks.

    Of several, each may be a victim whose files are lost; an empty dump may hide calls.
    """
    spoke = [r for r in s.ranks if not s.has_no_evidence(r)]
    alone = len(silent) == 1 and len(spoke) == len(s.expected_ranks) - 1
    return silent if alone and silent[0] not in s.ranks else []


def _many(s: Situation, named: list[int], waiters: list[int]) -> bool:
    """More than half of those concerned, by counters alone: the few may have called too much."""
    stacks = any(r in s.ranks and s.positions[r].path for r in named)
    return 2 * len(named) > len({*waiters, *named}) and not stacks


def _elsewhere(s: Situation, named: list[int], waiters: list[int]) -> Hypothesis:
    """They stand outside of the call that the others wait in."""
    first = s.positions[named[0]]
    row = ELSEWHERE[first.kind]
    extra, places = loader_worker(s, named[0]) if first.kind == "dataloader" else ("", [])
    if all(asks_to_generate(s.positions[r].path) for r in named):
        return _asks_a_server(s, named)
    cause = row.cause
    if cause == "missing_rank":
        cause = "init_deadlock" if _initialises(s) else _own_code(first)
    others = s.positions[waiters[0]]
    counted = bool(set(named) & s.calls.roots)
    if first.kind == "host_sync" and not counted:
        return _wait_for_gpus(s, named, waiters)
    return conclude(
        s,
        cause,
        f"{name_ranks(named)} {verb(named, row.one, row.many)} ({first.where}{extra}), while "
        f"{name_ranks(waiters)} {verb(waiters, 'waits', 'wait')} in {s.waits_in(waiters)}",
        sure="told" if counted else "likely" if others.kind == "host_sync" else "seen",
        ranks=named,
        evidence=[*s.seen_at(named), *places, *s.seen_at(waiters, 2)],
        remedy=row.remedy,
        needed=["Flight Recorder dumps: the collective that the GPUs wait in"]
        if others.kind == "host_sync"
        else [],
    )


def _wait_for_gpus(s: Situation, ranks: list[int], waiters: list[int]) -> Hypothesis:
    """What a GPU waits in is on no stack: the others' call, or one that they left out."""
    return conclude(
        s,
        "unknown",
        f"{name_ranks(ranks)} {verb(ranks, 'waits for its GPU', 'wait for their GPUs')} "
        f"({s.positions[ranks[0]].where}), while {name_ranks(waiters)} "
        f"{verb(waiters, 'waits', 'wait')} in {s.waits_in(waiters)}: one side calls what the other "
        "does not",
        sure="open",
        evidence=[*s.seen_at(ranks), *s.seen_at(waiters, 2)],
        needed=["Flight Recorder dumps: the collective that the GPUs wait in"],
    )


def _asks_a_server(s: Situation, ranks: list[int]) -> Hypothesis:
    """They wait for what a server generates; whether it failed its own log tells."""
    server = s.facts.roles.get(ENGINE)
    failed = server.event("traceback", "abort", "exit", *OWN) if server else None
    return conclude(
        s,
        "server_unhealthy",
        f"{name_ranks(ranks)} {verb(ranks, 'waits', 'wait')} for an answer of the inference server"
        + (f", which failed: {failed.text}" if failed else ""),
        roles=[ENGINE] if failed else [],
        sure="likely" if failed else "open",
        evidence=[*([failed.place] if failed else []), *s.seen_at(ranks)],
        needed=[] if failed else ["the server's log and stack, and whether it answers /health"],
    )


# Given to a trainer from outside: it blocks without any call of torch.
_GIVEN = re.compile(r"reward|judge|verif|agent|episode|tool_?call", re.I)


def _own_code(position: Position) -> Cause:
    """`user_code` for a reward or an agent, or an event loop that nothing wakes."""
    users = user_frames(position.path)
    given = any(_GIVEN.search(f.function) for f in users) or awaits_result(position.path)
    return "user_code" if given else "missing_rank"


def _initialises(s: Situation) -> bool:
    """By its heartbeats no rank is through with joining and loading its model."""
    beats = [c.beat.beat.phase if c.beat else "" for c in s.ranks.values()]
    return bool(beats) and set(beats) == {"init"}


def loader_worker(s: Situation, rank: int) -> tuple[str, list[SourceRef]]:
    """What the data loader's child does: its innermost user frame that is not idle waiting."""
    for child in s.ranks[rank].children:
        frames = child.main.frames if child.main else ()
        fetching = [f for f in frames if f.function in ("__getitem__", "__getitems__", "__next__")]
        if fetching:
            frame: Frame = (user_frames(frames) or fetching)[-1]
            # The user's own data set rather than a library's wrapper around it.
            mine = user_frames(fetching) or [frame]
            return f"; its worker is in {mine[-1]}", [child.place]
    return "", []


def _not_come(
    s: Situation, named: list[int], waiters: list[int], silent: Sequence[int]
) -> Hypothesis:
    """Counters, or sends and receives, show that they are behind; no stack says why."""
    first = s.graph.first_for(named)
    owes = first.owes if first else ""
    lost = set(silent).difference(named)
    unseen = [r for r in named if r not in s.positions or s.positions[r].kind == "unknown"]
    sure: Strength = "open" if set(named) <= set(silent) else "told"
    return conclude(
        s,
        "missing_rank",
        f"{name_ranks(named)} {verb(named, 'has', 'have')} not {owes}, for which "
        f"{name_ranks(waiters)} {verb(waiters, 'waits', 'wait')}{_side(s, named)}",
        sure=sure,
        ranks=named,
        evidence=s.recorded_at([*named, *waiters]),
        needed=[
            *([f"a stack of {name_ranks(unseen)} (py-spy dump)"] if unseen else []),
            *([f"Flight Recorder dumps of {name_ranks(list(lost))}, awaited too"] if lost else []),
        ],
    )


def _side(s: Situation, named: list[int]) -> str:
    """Whether host or device stands still, as far as dumps tell."""
    records = [c.record for r in named if (c := s.ranks.get(r))]
    if not records:
        return "; it left no dump"
    if not all(records):
        return ""
    open_calls = [sum(not op.done for op in record.operations) for record in records if record]
    if all(open_calls):
        return f"; the host is {open_calls[0]} calls ahead of the device, which stands still"
    return "; the last call is done and the host does not go on"


def _not_joined(s: Situation, named: list[int], waiters: list[int]) -> Hypothesis:
    """The start of the job, or of a process group, that some did not come to."""
    inside, known = s.positions[waiters[0]], [r for r in named if r in s.ranks]
    where = f": it is in {s.positions[named[0]].where}" if len(known) == 1 else ""
    # What keeps it from joining, where that is work of its own.
    kinds = {s.positions[r].kind for r in known}
    row = ELSEWHERE.get(kinds.pop()) if len(kinds) == 1 else None
    cause: Cause = row.cause if row and row.cause != "missing_rank" else "init_deadlock"
    return conclude(
        s,
        cause,
        f"{name_ranks(waiters)} {verb(waiters, 'waits', 'wait')} in {inside.op} during "
        f"initialisation; {name_ranks(named)} did not join{where}",
        sure="seen" if known else "likely",
        ranks=named,
        evidence=[*s.seen_at(known), *s.seen_at(waiters, 3)],
    )


def start_without_somebody(s: Situation) -> Hypothesis | None:
    """All that were seen wait for others to join, and nothing tells who is missing."""
    inside = s.at("init")
    if not inside or any(c.record and c.record.operations for c in s.ranks.values()):
        return None
    if any(s.positions[r].kind not in ("init", "unknown") for r in s.ranks):
        return None
    joined = [e for e in s.facts.all_events() if e.kind == "missing_ranks" and "joined" in e.detail]
    absent = sorted(s.expected_ranks.difference(s.ranks))
    return conclude(
        s,
        "init_deadlock",
        f"{name_ranks(inside)} {verb(inside, 'waits', 'wait')} in {s.positions[inside[0]].op} "
        "during initialisation; who is missing is not known"
        + (f" ({joined[0].text})" if joined else ""),
        sure="open",
        evidence=[*s.seen_at(inside, 3), *[e.place for e in joined[:1]]],
        needed=[f"stacks of {name_ranks(absent) if absent else 'all ranks, and the world size'}"],
    )


def too_few_joined(s: Situation) -> Hypothesis | None:
    """torch's store counts its clients; who did not come it does not know."""
    events = [e for e in s.facts.all_events() if e.kind == "missing_ranks" and "joined" in e.detail]
    # Ranks that made calls have joined: the line is from an earlier start.
    if not events or any(c.record and c.record.operations for c in s.ranks.values()):
        return None
    event = events[-1]
    joined, world = int(event.detail["joined"]), int(event.detail["world"])
    if joined >= world:
        return None
    waiting = {int(e.detail["waits"]) for e in events if "waits" in e.detail}
    # As many say that they wait as have joined: then it is all others that have not.
    # Unless a rank waits in two tasks: each node counts its own ranks from 0.
    sources = {(e.detail["waits"], e.detail.get("by")) for e in events if "waits" in e.detail}
    alone = len(waiting) == joined == len(sources)
    absent = sorted(set(range(world)) - waiting) if alone else []
    who = f"{name_ranks(absent)} did not come" if absent else "who is missing is not known"
    return conclude(
        s,
        "init_deadlock",
        f"{joined} of {world} processes joined the rendezvous in time; {who}",
        sure="seen" if absent else "likely",
        ranks=absent,
        evidence=[e.place for e in events[:4]],
        needed=["the logs of all nodes: which of their processes did not start, or not connect"],
        waits=[Block(sorted(waiting), absent, "joined the rendezvous")],
        state="exited" if s.dead or "imed out" in event.text else "hung",
        remedy="see on each node whether its processes started and reach the store's host and port",
        blame="environment",
    )


def too_few_gpus(s: Situation) -> Hypothesis | None:
    """The job's nodes have, or show Ray, fewer GPUs than it asks for."""
    events = [e for e in s.facts.all_events() if e.kind == "too_few_gpus"]
    # A GPU that failed, or had too little memory, was there.
    if not events or any(e.kind in OWN for e in s.facts.all_events()):
        return None
    return conclude(
        s,
        "init_deadlock",
        f"the job waits for more GPUs than there are: {events[-1].text}",
        sure="likely",
        evidence=[e.place for e in events[-4:]],
        needed=["`ray status`, or the job's node list: which node has not joined"],
        remedy="see which node has not joined, or ask for as many GPUs as the nodes have",
        blame="environment",
    )


def did_not_time_out(s: Situation) -> Hypothesis | None:
    """All ranks but one gave one call up, by their watchdogs; of that one there is no word."""
    calls = {
        r: (str(e.detail["op"]), e.detail.get("seq"))
        for r, c in s.ranks.items()
        if (e := next((e for e in c.events if e.kind == "timeout" and "op" in e.detail), None))
    }
    absent = sorted(s.expected_ranks.difference(calls))
    if len(calls) < 2 or len(set(calls.values())) > 1 or len(absent) != 1:
        return None
    if absent[0] in s.ranks and not s.has_no_evidence(absent[0]):
        return None
    operation, number = next(iter(calls.values()))
    component = s.ranks.get(absent[0])
    raised = root_exception(component) if component is not None else None
    if raised is not None:
        return conclude(
            s,
            "user_code",
            f"{name_ranks(absent)} raised {raised.text}, and {name_ranks(list(calls))} "
            f"timed out in {operation.lower()}, which it did not enter",
            ranks=absent,
            sure="seen",
            evidence=[raised.place, *_first_lines(s, calls)],
            state="exited",
            waits=[Block(sorted(calls), absent, f"entered {operation.lower()}")],
        )
    work = s.unfinished
    says = (
        f"{name_ranks(list(calls))} timed out in {operation.lower()}"
        + (f" (number {number})" if number is not None else "")
        + f"; {name_ranks(absent)} did not, and no line is from it"
        + (f"; the log ends in {bar_of(work)}" if work else "")
    )
    # Silence alone: its lines may only be elsewhere, and what it did is not told.
    cause: Cause = "missing_rank" if told_of(s, absent) else "unknown"
    cause = "rank_busy" if work else cause
    return conclude(
        s,
        cause,
        says,
        sure="likely",
        ranks=absent if cause != "unknown" else (),
        evidence=[
            *([work.place] if work else []),
            *_first_lines(s, calls),
        ],
        needed=[f"the log and a stack of {name_ranks(absent)}"],
        waits=[Block(sorted(calls), absent, f"entered {operation.lower()}")],
        state="exited" if s.gave_up else None,
    )


def _first_lines(s: Situation, ranks: Iterable[int]) -> list[SourceRef]:
    return [c.events[0].place for r in list(ranks)[:6] if (c := s.ranks[r]).events]


def told_missing(s: Situation) -> Hypothesis | None:
    """Ranks that torch or NCCL itself name as missing: desync report, monitored barrier, RAS.

    Late: such reports may list all ranks that have not finished, victims among them.
    """
    named: dict[int, SourceRef] = {}
    reports = [e for e in s.facts.all_events() if e.kind == "missing_ranks"]
    for event in reports:
        for rank in event.detail.get("ranks", []):
            named.setdefault(rank, event.place)
    for rank, component in s.ranks.items():
        for row in component.ras:
            if row.missing or 0 <= row.counts.get("launched", -1) < row.counts.get("most", -1):
                named.setdefault(rank, row.place)
    everyone = s.expected_ranks | set(range(max(named, default=-1) + 1))
    # A report that some rank writes of others; it may also list all that have not finished.
    told = [e for e in reports if e.detail.get("ranks")]
    reported = any("joined but didn't finish" not in e.text for e in told)
    ready = next((e for e in reports if e.text.startswith(READY)), None)
    if not named and ready is not None:
        return conclude(
            s, "missing_rank", ready.text, sure="likely", evidence=[ready.place],
            needed=["stacks of the ranks that are not ready"],
        )  # fmt: skip
    # RAS or a watchdog that lists every rank tells none from the others.
    if not named or (len(named) == len(everyone) and not reported):
        return None
    by = PurePath(next(iter(named.values())).path).name
    return conclude(
        s,
        "missing_rank",
        f"{name_ranks(list(named))} did not join, says {by}",
        sure="likely",
        ranks=named,
        evidence=list(named.values())[:6],
        needed=[f"a stack of {name_ranks(list(named))}"],
    )
