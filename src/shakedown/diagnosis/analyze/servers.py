"""What stacks and logs say of roles: a server that stands still, a trainer that went on."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.model import Hypothesis
from shakedown.diagnosis.analyze.position import Position, judge_path
from shakedown.diagnosis.analyze.raised import is_full
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.read.placements import ENGINE
from shakedown.diagnosis.records import LogEnd, LogEvent, SourceRef, Stack
from shakedown.stacks.frames import user_frames

# Waits below a request: a server without work is `idle`, one that computes moves.
_STANDS = frozenset({"collective", "p2p", "host_sync", "storage"})


def stands_still(server: ComponentFacts) -> tuple[str, SourceRef] | None:
    """The call in which one of the server's processes waits, the same in every sample.

    One sample is not enough: a server at work waits for its GPU all the time.
    """
    by_process: Mapping[int | None, dict[int, Stack]] = defaultdict(dict)
    for stack in [*server.stacks, *server.children]:
        by_process[stack.who.pid][stack.sample] = stack
    for samples in by_process.values():
        mains = [main for stack in samples.values() if (main := stack.main)]
        if len(mains) < 2 or len({path_key(main.frames) for main in mains}) > 1:
            continue
        newest = samples[max(samples)]
        position = judge_path(mains[-1].frames)
        if position.kind in _STANDS:
            return _said(position), newest.place
    return None


def _said(position: Position) -> str:
    users = user_frames(position.path)
    frame = users[-1] if users else None
    python = next((f for f in reversed(position.path) if f.file.endswith(".py") and f.line), None)
    return f"{position.op or position.kind} ({frame or python or 'native code'})"


# What an engine, or the router before it, says of its own end.
_DEAD = re.compile(
    r"EngineDeadError|EngineCore .{0,60}(?:died|failed)|RPC call to \w+ timed out"
    r"|no_available_workers|all circuits open",
    re.I,
)


def told_dead(s: Situation) -> Hypothesis | None:
    """An engine says that it is dead, and its log does not go on; why it died nothing tells."""
    events = [
        e
        for e in s.facts.all_events()
        if e.kind in ("server_unhealthy", "traceback") and _DEAD.search(e.text)
    ]
    if not events or went_on(s.facts.ends, events[-1]):
        return None
    full = next(filter(is_full, s.facts.all_events()), None)
    if full is not None:
        return conclude(
            s, "storage", f"the inference server ended: {full.text}", sure="likely",
            evidence=[full.place, events[0].place],
        )  # fmt: skip
    return conclude(
        s,
        "server_unhealthy",
        f"the inference server is dead, or does not answer: {events[0].text}",
        # Where all ranks are the engine's own it is the job, which nobody accuses.
        roles=[] if s.facts.of_engine else [ENGINE],
        sure="likely",
        evidence=[e.place for e in events[:4]],
        needed=["the server's own log before that line, and stacks of its workers"],
    )


_WENT_ON = 20  # lines: a client that gives up says so in fewer, with its traceback


def went_on(ends: Iterable[LogEnd], event: LogEvent) -> bool:
    """The event's log ends with a training step: what it waited for has come."""
    return any(
        end.place.path == event.place.path and end.place.line > event.place.line and end.stepping
        for end in ends
    )


def outlived(client: ComponentFacts, event: LogEvent) -> bool:
    """The client that logged the event went on for lines: its server came back."""
    logged = any(e is event for e in client.events)
    end = max(
        (row.place.line for row in client.logs if row.place.path == event.place.path), default=0
    )
    return logged and end - event.place.line > _WENT_ON
