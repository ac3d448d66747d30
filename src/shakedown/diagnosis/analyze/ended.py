"""Question 2: has something ended or been stopped?

What ended first explains what waits for it.
"""

import re
import signal
from collections.abc import Mapping, Sequence

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.liveness import goes_on
from shakedown.diagnosis.analyze.model import Cause, Hypothesis, name_ranks, verb
from shakedown.diagnosis.analyze.raised import (
    KILLED_FOR,
    OWN,
    cause_of,
    cause_of_words,
    is_vague,
    is_victims,
    own_cause,
    root_exception,
    shape_of,
    told_cause,
)
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.read.clock import since
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.records import LogEvent, SourceRef
from shakedown.stacks.frames import user_frames


def _lone_traceback(s: Situation) -> LogEvent | None:
    """The one exception in logs that name no rank: it is of the rank that ended."""
    found = [e for e in s.facts.events if e.kind == "traceback" and not e.detail.get("chained")]
    own = [e for e in found if e.detail.get("exception") and not is_victims(e)]
    return own[-1] if len({e.text for e in own}) == 1 else None


def _told_otherwise(s: Situation, ended: Sequence[int]) -> bool:
    """torch compared the calls itself: the exit codes that follow from it tell nothing."""
    codes = [s.ranks[r].exit_code or 0 for r in ended]
    mismatch = any(e.kind == "collective_mismatch" for e in s.facts.all_events())
    return mismatch and all(code > 0 for code in codes)


def dead_rank(s: Situation) -> Hypothesis | None:
    """Some ranks are gone, or raised an error of their own, and that explains the others."""
    raised = _uncaught(s)
    killed = _went_first(s)
    own = {r: cause for r, c in s.ranks.items() if (cause := own_cause(c)) in OWN.values()}
    own = own if failed(s) else {}
    lone = _lone_traceback(s) if len(s.dead) == 1 and not raised and not own else None
    killed = killed or (s.dead if lone is not None else [])
    # An exception says more than an end. Where all ranks were killed none of them is named.
    culprits = sorted({*own, *raised} if own else raised) or (
        killed if len(killed) < max(len(s.ranks), 2) else []
    )
    culprits = _first_of(s, culprits, raised)
    silent = not s.dead or _nobody_waits(s)
    if not culprits or (silent and not raised and not own):
        return None
    # A stage that failed is over: a call that seems open had its end noted nowhere any more.
    over = s.facts.outcome is not None and s.facts.outcome.state == "failed"
    if raised and not over and all(r in s.waiting for r in raised):
        return None  # still inside a collective: the cleanup rule says more
    if raised and _in_teardown(s, raised):
        return None  # alive, and the others are still in the loop: so does it here
    if len(culprits) == len(s.expected_ranks) and len(culprits) > 1:
        return _every_rank(s, raised, culprits)
    if lone is None and not raised and not own and _told_otherwise(s, culprits):
        return None
    return _ended(s, culprits, raised if lone is None else {culprits[0]: lone})


def _ended(s: Situation, culprits: list[int], raised: Mapping[int, LogEvent]) -> Hypothesis:
    first = culprits[0]
    cause = _why_ended(s, first, raised.get(first))
    culprits = _of_the_gpu(s, culprits) if cause == "gpu_error" else culprits
    why, places = _death(s.ranks[culprits[0]], raised.get(culprits[0]))
    silent = len(culprits) > 1 and not raised
    silent = silent and all(_death(s.ranks[r], None)[0] == _GONE for r in culprits)
    if silent:
        why = "their processes are gone; which was first is not told, a launcher ends the others"
    shared = cause == "init_deadlock" or (cause == "storage" and len(culprits) > 1)
    shared = shared or (cause == "server_unhealthy" and not s.facts.of_engine)
    # The sum over all ranks is no number.
    shared = shared or cause == "diverged"
    # Of an error that is one of a branch where others wait, and of the code where none does.
    told = told_cause(raised[first]) if first in raised else None
    shared = shared or (cause == "user_code" and told == "conditional_collective")
    needed = [] if raised else ["kernel log (dmesg) for out-of-memory kills"]
    needed += ["the launcher's log, which has exit codes"] if silent else []
    # An engine of one process: its rank tells nothing that the server does not.
    alone = s.facts.of_engine and len(s.expected_ranks) == 1
    return conclude(
        s,
        cause,
        f"{'the engine' if alone else name_ranks(culprits)} ended: {why}",
        # A port is the configuration's: who came second to it is not at fault. What is full for
        # several ranks is full for all.
        ranks=[] if shared or alone or silent else culprits,
        roles=[ENGINE] if alone and cause not in ("init_deadlock", "network") else [],
        sure="told",
        evidence=places + [c for r in culprits[1:4] for c in _death(s.ranks[r], raised.get(r))[1]],
        remedy="" if cause == "diverged" else _REPAIR,
        needed=needed,
        blame=None if cause == "diverged" else "code" if raised else "environment",
    )


_REPAIR = "repair what ended it, then start the stage again from its checkpoint"
# Code of a rank's own, in which it waits for no other rank.
_OWN_CODE = ("user", "busy", "dataloader", "storage", "compile")


def _nobody_waits(s: Situation) -> bool:
    """Ranks ended, nothing tells how, and all others go on in code of their own.

    A rank with the smaller share of an evaluation, or that saves nothing, ends before the others.
    """
    silent = all(s.ranks[r].exit_code is None and not s.ranks[r].events for r in s.dead)
    apart = all(s.positions[r].kind in _OWN_CODE and goes_on(s.ranks[r], s) for r in s.alive)
    return bool(s.dead and s.alive) and silent and apart and s.facts.outcome is None


def _went_first(s: Situation) -> list[int]:
    """Dead ranks that let the others down, as far as their ends tell."""
    ended = [r for r in s.dead if _ended_by_itself(s, r)]
    # A launcher ends the others of its node: a kill that is told explains those that are just gone.
    return [r for r in ended if _killed(s.ranks[r])] or ended


def _of_the_gpu(s: Situation, ranks: list[int]) -> list[int]:
    """Those of whose GPU the driver itself tells: NVLink's peers log its error as their own."""
    told = [r for r in ranks if any(_is_drivers(e) for e in s.ranks[r].events)]
    return told or ranks


def _is_drivers(event: LogEvent) -> bool:
    return event.kind == "gpu_error" and "bus" in event.detail and "Nonfatal" not in event.text


def _why_ended(s: Situation, rank: int, raised: LogEvent | None) -> Cause:
    told = own_cause(s.ranks[rank]) or (cause_of(raised) if raised else None)
    if told == "conditional_collective" and not _others_wait(s, rank):
        return "user_code"
    if told == "dataloader" and _of_memory(s):
        return "out_of_memory"  # its workers are what the kernel killed
    if told is not None or s.facts.of_engine:
        return told or "server_unhealthy"
    if raised is not None:
        return "user_code" if raised.detail.get("exception") else _beside(s, raised)
    # The kernel tells of a kill for memory, torchrun of a rank that was killed: of one end.
    if s.ranks[rank].exit_code == -signal.SIGKILL and _of_memory(s):
        return "out_of_memory"
    return "missing_rank"  # it went without a word


def _beside(s: Situation, raised: LogEvent) -> Cause:
    """Of a traceback whose last line is cut off: what another line of its file tells."""
    rows = [d for d in s.facts.digests if d.place.path == raised.place.path]
    words = [cause_of_words(line.text) for d in rows for line in d.notable]
    return next((cause for cause in words if cause), "user_code")


def _others_wait(s: Situation, rank: int) -> bool:
    """Seen, or told by their watchdogs. Else all ranks may have done as this one did."""
    others = {r: c for r, c in s.ranks.items() if r != rank}
    told = any(e.kind == "timeout" for c in others.values() for e in c.events)
    return told or not set(s.waiting).isdisjoint(others)


def _uncaught(s: Situation) -> dict[int, LogEvent]:
    """Ranks with an exception of their own.

    One that reports a time-out after it, while others with an exception do not, had caught it and
    went on to wait like all.
    """
    found = {r: e for r, c in s.ranks.items() if (e := root_exception(c)) is not None}
    raised = {r: e for r, e in found.items() if cause_of(e) or not is_vague(e)}
    waited = {
        r
        for r in raised
        if any(e.kind == "timeout" and "seq" in e.detail for e in s.ranks[r].events)
    }
    raised = {r: e for r, e in raised.items() if r not in waited or len(waited) == len(raised)}
    return {r: e for r, e in raised.items() if not _works(s, r)}


def _works(s: Situation, rank: int) -> bool:
    """Someone took its stack, which is not in its end: what it logged was caught, or a child's."""
    outside = [stack for stack in s.ranks[rank].stacks if stack.tool != "faulthandler"]
    return bool(outside) and s.positions[rank].kind not in ("teardown", "dead", "unknown")


# Seconds: errors nearer than this may be independent of each other, or their clocks differ.
_TOGETHER = 5.0


def _first_of(s: Situation, ranks: list[int], raised: Mapping[int, LogEvent]) -> list[int]:
    """Those that ended first, and those with the same error: what comes later follows from it."""
    ends = {r: raised.get(r) or s.ranks[r].event(*OWN, "abort", "exit") for r in ranks}
    timed = {r: e for r, e in ends.items() if e is not None}
    if len(timed) < len(ends) or len(timed) < 2:
        return ranks
    first = next((e for e in timed.values() if all(_not_after(e, o) for o in timed.values())), None)
    if first is None:
        return ranks
    return [
        r
        for r, e in timed.items()
        if shape_of(e.text) == shape_of(first.text) or not _after(e, first)
    ]


def _not_after(event: LogEvent, other: LogEvent) -> bool:
    known = event.at is not None and other.at is not None
    return event is other or (known and since(event.at or 0.0, other.at or 0.0) >= 0)


def _after(event: LogEvent, first: LogEvent) -> bool:
    return since(first.at or 0.0, event.at or 0.0) > _TOGETHER


def _of_memory(s: Situation) -> bool:
    return any(e.kind == "oom" or e.detail.get("how") == KILLED_FOR for e in s.facts.events)


def _in_teardown(s: Situation, raised: Mapping[int, LogEvent]) -> bool:
    torn = all(s.positions[r].kind == "teardown" for r in raised)
    return torn and any(s.positions[r].path for r in s.waiting if r not in raised)


def _every_rank(s: Situation, raised: Mapping[int, LogEvent], ended: list[int]) -> Hypothesis:
    """No rank is at fault alone: an error that all share lies in what all run.

    Numbers differ between ranks (a device, a size, a process): they do not make another error.
    """
    kinds: dict[str, list[int]] = {}
    for rank in ended:
        text, _ = _death(s.ranks[rank], raised.get(rank))
        kinds.setdefault(shape_of(text), []).append(rank)
    first, _ = _death(s.ranks[ended[0]], raised.get(ended[0]))
    told = "; ".join(
        f"{name_ranks(ranks)}: {_death(s.ranks[ranks[0]], raised.get(ranks[0]))[0]}"
        for ranks in list(kinds.values())[:4]
    )
    one = raised.get(ended[0])
    cause = told_cause(one) if one is not None and len(kinds) == 1 else None
    # Where all say it they all left the same parameters out.
    cause = "user_code" if cause == "conditional_collective" else cause
    return conclude(
        s,
        cause or "unknown",
        f"all {len(ended)} ranks ended with the same error: {first}"
        if len(kinds) == 1
        else f"every rank ended with an error of its own; which was first is not known: {told}",
        sure="likely" if cause else "open",
        evidence=[p for r in ended[:6] for p in _death(s.ranks[r], raised.get(r))[1]],
        needed=["the configuration and the inputs that all ranks share, and one rank's whole log"]
        if len(kinds) == 1
        else ["the logs with times, to tell which error was first"],
        remedy="repair what ended it, then start the stage again from its checkpoint",
        blame="code",
    )


def _ended_by_itself(s: Situation, rank: int) -> bool:
    """Whether the end of a rank is its own, as far as its process and its log tell.

    A launcher names whom it saw first, and others may have let that one down: an exit code or an
    abort alone convicts nobody, where nothing shows that other ranks waited for this one.
    """
    component = s.ranks[rank]
    if _killed(component):
        return True
    # An abort without a word is the watchdog's more often than not.
    aborted = any(e.kind == "exit" and e.detail.get("how") == "Aborted" for e in component.events)
    if _is_victim(component) or component.exit_code == -signal.SIGABRT or aborted:
        return False
    others = [c for r, c in s.ranks.items() if r != rank and r not in s.dead]
    coded = component.exit_code is not None or any(e.kind == "exit" for e in component.events)
    survived = any((_is_victim(c) and not coded) or c.rank in s.waiting for c in others)
    # Gone without a code or a last word, like all others: nothing tells them apart.
    return survived or (bool(others) and component.exit_code is None)


_KILLS = frozenset({-4, -7, -8, -9, -11})  # signals that no transport and no launcher sends


def _killed(component: ComponentFacts) -> bool:
    words = ("Killed", "Segmentation fault", "Bus error", KILLED_FOR)
    ends = [e.detail for e in component.events if e.kind == "exit"]
    # Ray names the actor whose process is gone.
    return component.exit_code in _KILLS or any(
        end.get("how") in words or "actor" in end for end in ends
    )


# What the transport throws when a peer is gone or sent something else.
_TRANSPORT = re.compile(r"gloo::|c10::Dist")


def _aborted_by_peers(component: ComponentFacts) -> bool:
    """A watchdog or a transport ends, by SIGABRT, a rank that others let down: a victim."""
    # That is the rank's own end, whatever its transport threw afterwards.
    if any(e.kind in OWN for e in component.events):
        return False
    thrown = [str(e.detail.get("type", "")) for e in component.events if e.kind == "abort"]
    timed_out = any(e.kind in ("timeout", "gave_up") for e in component.events)
    return timed_out or any(_TRANSPORT.search(name) for name in thrown)


def _is_victim(component: ComponentFacts) -> bool:
    kinds = {e.kind for e in component.events}
    let_down = {"peer_closed", "traceback", "timeout", "nccl_error"}
    return bool(kinds & let_down) or _aborted_by_peers(component)


def _death(component: ComponentFacts, raised: LogEvent | None) -> tuple[str, list[SourceRef]]:
    if raised is not None:
        users = user_frames(raised.frames)
        at = f" at {users[-1].file}:{users[-1].line}" if users else ""
        return f"{raised.text}{at}", [raised.place]
    places = [component.state.place] if component.state else []
    places += [u.place for u in component.unattachable[:1]]
    event = component.event(*OWN) or component.event("abort", "exit")
    if event is not None:
        return event.text, [event.place, *places]
    if component.exit_code is not None:
        code = component.exit_code
        return (f"signal {-code}" if code < 0 else f"exit code {code}"), places
    return _GONE, places


_GONE = "its process is gone"


_FAILED = frozenset(
    {
        "traceback",
        "exit",
        "abort",
        "timeout",
        "gave_up",
        "peer_closed",
        "server_unhealthy",
        "nccl_error",
    }
)


def failed(s: Situation) -> bool:
    """Whether anything tells that the job did: a want of memory can be caught, and tried again."""
    found = bool(s.dead) or s.stuck or s.facts.outcome is not None
    # The kernel's own words of a kill are of an end.
    return found or any(
        e.kind in _FAILED or (e.kind == "oom" and e.detail.keys() & {"pid", "pid_b"})
        for e in s.facts.all_events()
    )


def told_of_nobody(s: Situation) -> Hypothesis | None:
    """A GPU's error or a want of memory of a job that failed, by no rank: of a node at most."""
    events = [e for e in s.facts.events if e.kind in OWN or e.detail.get("how") == KILLED_FOR]
    if not events or not failed(s):
        return None
    hosts = {e.who.host for e in events} - {""}
    first = events[0]
    at = f" on {min(hosts)}" if len(hosts) == 1 else ""
    return conclude(
        s,
        OWN.get(first.kind, "out_of_memory"),
        f"{first.text}{at}; which rank it was is not told",
        nodes=hosts if len(hosts) == 1 else (),
        sure="likely",
        evidence=[e.place for e in events[:4]],
        needed=["which rank runs on that GPU or as that process"],
    )


def stopped_rank(s: Situation) -> Hypothesis | None:
    """A process in state T: stopped by a signal or a debugger."""
    stopped = s.at("stopped")
    if not stopped:
        return None
    return conclude(
        s,
        "missing_rank",
        f"{name_ranks(stopped)} {verb(stopped, 'is', 'are')} stopped (process state T)"
        + (f"; {name_ranks(s.waiting)} {verb(s.waiting, 'waits', 'wait')}" if s.waiting else ""),
        ranks=stopped,
        sure="told",
        evidence=[p for r in stopped if (p := s.positions[r].place)],
        remedy="find who sent SIGSTOP (a debugger, a job step, the suspend of a scheduler); "
        "kill -CONT lets the run go on",
        blame="environment",
    )
