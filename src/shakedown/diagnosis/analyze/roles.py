"""Roles, that is all that is no rank: those that ended, and those for which trainers starve.

Ranks that wait for a batch are victims: nothing here ever names one.
"""

import re

from shakedown.diagnosis.actors import of_ray
from shakedown.diagnosis.analyze.causes import Strength, conclude
from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.analyze.graph import Block
from shakedown.diagnosis.analyze.model import Cause, Hypothesis
from shakedown.diagnosis.analyze.raised import cause_of, root_exception
from shakedown.diagnosis.analyze.servers import outlived, stands_still, went_on
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.read.ray import HEAD
from shakedown.diagnosis.records import LogEvent, SourceRef
from shakedown.stacks.frames import Frame, user_frames

ORCHESTRATOR, INFERENCE = "orchestrator", "inference"


def starvation(s: Situation) -> Hypothesis | None:
    """Trainers wait for a training batch: the side that makes batches is at fault."""
    starving, places = _starving(s)
    if not starving:
        return None
    cause, roles, why, more, sure = _who(s)
    # A wait for work that a stack alone shows, of whoever was looked at, is what idle ones do.
    if not s.facts.roles and s.ranks and not any(c.beats or c.events for c in s.ranks.values()):
        return None
    return conclude(
        s,
        cause,
        f"the trainer waits for a training batch: {why}",
        roles=roles,
        sure=sure,
        evidence=[*more, *places][:12],
        state="hung",
        needed=["logs and stacks of the orchestrator and the server"] if sure == "open" else [],
        waits=[Block(starving if s.ranks else ["trainer"], roles, "brought a training batch")],
    )


def _starving(s: Situation) -> tuple[list[int], list[SourceRef]]:
    """Ranks that wait for a batch by heartbeat, last log line or stack.

    Ranks in a collective beside a waiting rank 0, which reads for all, starve too.
    """
    found: dict[int, SourceRef] = {}
    for rank, component in s.ranks.items():
        beat = component.beat
        if beat and beat.beat.phase == "rollout_wait":
            found[rank] = beat.place
        elif (end := _last_starving(component)) is not None:
            found[rank] = end
        elif s.positions[rank].kind == "batch_wait" and s.positions[rank].place:
            found[rank] = s.positions[rank].place  # type: ignore[assignment]
    loose = [e for e in s.facts.events if e.kind == "starving"]
    if not s.ranks and loose and not went_on(s.facts.ends, loose[-1]):
        # No rank is known from a lone log: 0 stands for whoever wrote it.
        return [0], [loose[-1].place]
    # A rank that neither starves nor waits may be the one at fault: other rules judge it.
    others = set(s.alive) - set(found) - set(s.waiting)
    blocked = [r for r in found if s.positions[r].kind == "dead"]
    return ([], []) if others or blocked else (sorted(found), list(found.values()))


def _last_starving(component: ComponentFacts) -> SourceRef | None:
    """The log's last event is the wait for a batch, at most a few lines from its end."""
    starving = [e for e in component.events if e.kind == "starving"]
    if not starving or starving[-1] is not component.events[-1] or component.beats:
        return None
    if went_on(component.logs, starving[-1]):
        return None
    end = max((log.place.line for log in component.logs), default=0)
    # 20 lines, as in servers.py: whoever writes more has gone on.
    return starving[-1].place if end - starving[-1].place.line <= 20 else None


_Finding = tuple[Cause, list[str], str, list[SourceRef], Strength]


def _who(s: Situation) -> _Finding:
    orchestrator, server = s.facts.roles.get(ORCHESTRATOR), s.facts.roles.get(INFERENCE)
    # The server first: without it the orchestrator ends as well.
    ends: tuple[tuple[ComponentFacts | None, Cause], ...] = (
        (server, "server_unhealthy"),
        (orchestrator, "rollout_starvation"),
    )
    for component, cause in ends:
        if component and (gone := _gone(component)):
            text, place = gone
            raised = root_exception(component) if component is orchestrator else None
            # Of an environment, a reward or an agent: the orchestrator itself is sound.
            given = raised is not None and cause_of(raised) == "user_code"
            told: Cause = "user_code" if given else cause
            return told, [component.role], f"the {component.role} {text}", place, "told"
    speaking = [c for c in (orchestrator, server) if c]
    event = _last_event(speaking, "server_unhealthy")
    # Strongest evidence first: an end (above), then what logs say, then heartbeats, and last
    # where a process stands.
    if event is not None and not (orchestrator and outlived(orchestrator, event)):
        why = f"the inference server does not answer ({event.text})"
        return "server_unhealthy", [INFERENCE], why, [event.place], "seen"
    event = _last_event(speaking, "staleness")
    if event is not None and _still_said(speaking, event):
        why = f"the orchestrator holds rollouts back ({event.text})"
        return "staleness_capacity", [ORCHESTRATOR], why, [event.place], "seen"
    if orchestrator and _waits_for_weights(orchestrator):
        return _for_weights(orchestrator, server)
    still = stands_still(server) if server and not (orchestrator and orchestrator.events) else None
    if still is not None:
        why = f"the inference server stands in {still[0]} in every sample"
        return "server_unhealthy", [INFERENCE], why, [still[1]], "likely"
    return _stuck_orchestrator(orchestrator)


def _for_weights(orchestrator: ComponentFacts, server: ComponentFacts | None) -> _Finding:
    beat = orchestrator.beat
    if beat is None:
        # Each waits for the other's files: a folder that they do not share looks like this.
        why = "the orchestrator waits for new weights, and each for the other"
        return "rollout_starvation", [], why, [orchestrator.events[-1].place], "likely"
    roles, why, places = _one_sided(orchestrator, server)
    return "weight_sync_one_sided", roles, why, [*places, beat.place], "likely" if roles else "open"


# A server's own functions that load new weights, and those in which it handles a request.
_LOADS = re.compile(
    r"^(?!\w*(?:loop|thread|worker)$)_?(?:load|update|sync|receive|refit)_\w*(?:weights?|params?)\w*$"
    r"|^load_model$"
)
_HANDLES = re.compile(r"^(?:do_POST|do_PUT|run_endpoint_function|handle_\w*request\w*)$")
_READS = re.compile(r"^(?:readinto|recv|recv_into|read|readline|select|poll|accept)$")
_CLIENT = re.compile(r"(?:^|/)(?:httpx|httpcore|requests|urllib3|aiohttp|http/client\.py)")


def _one_sided(
    orchestrator: ComponentFacts, server: ComponentFacts | None
) -> tuple[list[str], str, list[SourceRef]]:
    """Who keeps a weight update from ending, as far as both sides' stacks tell."""
    served = _serving(server) if server else None
    if served is not None:
        frame, place = served
        return [INFERENCE], f"the server does not end the weight update ({frame})", [place]
    if orchestrator.path and _awaits_answer(orchestrator.path):
        why = "the orchestrator waits for an answer to its weight update"
        return [], f"{why}; no stack of the server shows who handles it", []
    return [ORCHESTRATOR], "the orchestrator itself waits for new weights", []


def _serving(server: ComponentFacts) -> tuple[Frame, SourceRef] | None:
    """What the server works on for a request, or in a weight update, in every sample."""
    stacks = [*server.stacks, *server.children]
    by_sample: dict[int, dict[object, tuple[Frame, SourceRef]]] = {}
    for stack in stacks:
        found = by_sample.setdefault(stack.sample, {})
        for thread in stack.threads:
            inner = thread.frames[-1] if thread.frames else None
            # A thread that waits for input works on nothing.
            if inner is None or _READS.match(inner.function):
                continue
            if any(_LOADS.search(f.function) or _HANDLES.match(f.function) for f in thread.frames):
                frame = (user_frames(thread.frames) or thread.frames)[-1]
                found[path_key(thread.frames)] = frame, stack.place
    if not by_sample:
        return None
    # A thread that is somewhere else in the next sample gets on with its work.
    common = set.intersection(*(set(rows) for rows in by_sample.values()))
    newest = by_sample[max(by_sample)]
    return next((row for key, row in newest.items() if key in common), None)


def _awaits_answer(path: tuple[Frame, ...]) -> bool:
    """The event loop has nothing to run, or the path is inside an HTTP client."""
    idle = path[-1].function in ("select", "poll") and any(
        f.function in ("_run_once", "run_forever") for f in path
    )
    return idle or any(_CLIENT.search(f.file) for f in path)


def _stuck_orchestrator(orchestrator: ComponentFacts | None) -> _Finding:
    if orchestrator is None:
        why = "nothing was given of the process that makes the batches"
        return "rollout_starvation", [], why, [], "open"
    beat, stack = orchestrator.beat, orchestrator.stack
    places = [source.place for source in (beat, stack) if source]
    if beat is not None:
        why = f"the orchestrator stands in phase {beat.beat.phase} at step {beat.beat.step}"
        return "rollout_starvation", [ORCHESTRATOR], why, places, "likely"
    if stack is not None:
        frame = (user_frames(orchestrator.path) or orchestrator.path)[-1]
        why = f"the orchestrator is in {frame}"
        # Whoever waits for an answer may be waiting for a server, an environment or a reward.
        if _awaits_answer(orchestrator.path):
            return "unknown", [], f"{why}, which waits for an answer", places, "open"
        return "rollout_starvation", [ORCHESTRATOR], why, places, "likely"
    return "rollout_starvation", [], "no batch came from the orchestrator", [], "open"


def _gone(component: ComponentFacts) -> tuple[str, list[SourceRef]] | None:
    """How a component ended, if it did."""
    raised = component.event("traceback", "abort", "oom")
    if component.exit_code not in (None, 0):
        code = component.exit_code or 0
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        places = [raised.place] if raised else []
        return (f"{how}: {raised.text}" if raised else how), places
    state = component.state
    if state is not None and state.state in "ZXT":
        how = "is stopped (process state T)" if state.state == "T" else "is dead"
        return how, [state.place]
    gone = [u for u in component.unattachable if u.reason == "gone"]
    if gone and not component.path:
        return "is dead", [gone[0].place]
    # An exception that other events follow was survived.
    if raised is not None and not component.path and component.events[-1] is raised:
        return f"ended: {raised.text}", [raised.place]
    return None


def _last_event(components: list[ComponentFacts], kind: str) -> LogEvent | None:
    found = [e for c in components for e in c.events if e.kind == kind]
    return found[-1] if found else None


def _still_said(components: list[ComponentFacts], event: LogEvent) -> bool:
    """The log ends with it: rollouts that were held back earlier and then went on explain nothing.

    A heartbeat in another phase than one that makes rollouts says where the component is now.
    """
    owner = next(c for c in components if any(e is event for e in c.events))
    end = max((row.place.line for row in owner.logs), default=event.place.line)
    phase = owner.beat.beat.phase if owner.beat else ""
    elsewhere = phase in ("weight_sync", "checkpoint")
    went_on = phase == "data" and end - event.place.line > 1
    near = owner.events[-1] is event and end - event.place.line <= 20
    return near and not elsewhere and not went_on


def _waits_for_weights(component: ComponentFacts) -> bool:
    beat = component.beat
    if beat is not None:
        return beat.beat.phase == "weight_sync"
    return bool(component.events) and component.events[-1].kind == "waiting_weights"


# What an orchestrator raises because its server is gone or stands still.
_SERVER_FAULT = re.compile(
    r"(?:ServerError|Server\w*Timeout): .{0,200}(?:server|healthy|answer)"
    r"|server .{0,80}(?:unhealthy|not been healthy|not healthy|did not answer|unreachable)",
    re.I,
)


_ENDED: dict[str, Cause] = {INFERENCE: "server_unhealthy", ORCHESTRATOR: "rollout_starvation"}


def dead_role(s: Situation) -> Hypothesis | None:
    """A supervisor ended the stage because a component that is no trainer went first."""
    for role in _ENDED:
        component = s.facts.roles.get(role)
        outcome = s.facts.outcome
        if component is None or outcome is None or outcome.state != "failed":
            continue
        if not outcome.failed_component.startswith(role):
            continue
        gone = _gone(component) or ("failed", [outcome.place])
        culprit, why = role, gone[0]
        # The orchestrator gave its server up and ended with that error: the server is at fault.
        if role == ORCHESTRATOR and _SERVER_FAULT.search(why):
            culprit, why = INFERENCE, f"does not answer: the orchestrator {why}"
        cause = _ENDED[culprit]
        return conclude(
            s,
            cause,
            f"the {culprit} {why}",
            roles=[culprit],
            sure="told",
            evidence=[*gone[1], outcome.place],
            state="exited",
            blame="environment",
        )
    return None


def ray_ended(s: Situation) -> Hypothesis | None:
    """Without its head a Ray cluster ends within a minute, and no call between actors is made."""
    head = s.facts.roles.get(HEAD)
    event = head.event("server_unhealthy") if head else None
    if event is None:
        return _actor_ended(s)
    return conclude(
        s,
        "server_unhealthy",
        event.text,
        roles=[HEAD],
        sure="told",
        evidence=[event.place],
        remedy="read gcs_server.out and gcs_server.err in Ray's session folder; start the stage "
        "again from its checkpoint",
    )


def _actor_ended(s: Situation) -> Hypothesis | None:
    roles = {role: c for role, c in s.facts.roles.items() if of_ray(role)}
    died = {role: e for role, c in roles.items() if (e := c.event("exit")) is not None}
    states = {r: c.state for r, c in roles.items() if c.state}
    gone = {r: state for r, state in states.items() if state.state in "XZ"}
    stopped = {r: state for r, state in states.items() if state.state == "T"}
    named = died or gone or stopped
    if not named:
        return None
    how, remedy = "ended: its process is gone", ""
    if died:
        remedy = "read the end of its log in Ray's session folder, and dmesg of its node"
    elif not gone:
        how = "is stopped (process state T)"
        remedy = "find who sent SIGSTOP; kill -CONT lets the run go on"
    return conclude(
        s,
        "missing_rank",
        next(iter(died.values())).text if died else f"{', '.join(sorted(named)[:4])} {how}",
        roles=list(named),
        sure="told",
        evidence=[record.place for record in named.values()][:6],
        remedy=remedy,
        blame="environment",
    )
