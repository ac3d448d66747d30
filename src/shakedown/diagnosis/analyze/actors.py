"""Ray: an actor that ended, was stopped, or works on while all others have nothing to do."""

from collections.abc import Sequence

from shakedown.diagnosis.actors import of_ray
from shakedown.diagnosis.analyze.causes import conclude
from shakedown.diagnosis.analyze.graph import Block, Node, name_of
from shakedown.diagnosis.analyze.model import Cause, Hypothesis
from shakedown.diagnosis.analyze.position import Position, position_of
from shakedown.diagnosis.analyze.situation import Situation
from shakedown.diagnosis.facts import ComponentFacts
from shakedown.diagnosis.read.ray import HEAD
from shakedown.stacks.frames import user_frames


def _actors(s: Situation) -> dict[Node, ComponentFacts]:
    """Workers of Ray: ranks of the job, and those with a role of their own."""
    found: dict[Node, ComponentFacts] = {r: s.ranks[r] for r in s.facts.actors if r in s.ranks}
    return found | {role: c for role, c in s.facts.roles.items() if of_ray(role)}


def head_lost(s: Situation) -> Hypothesis | None:
    """Without its head a Ray cluster ends within a minute, and no call between actors is made."""
    head = s.facts.roles.get(HEAD)
    event = head.event("server_unhealthy") if head else None
    if event is None:
        return None
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


def actor_ended(s: Situation) -> Hypothesis | None:
    """An actor that is no rank died, or is stopped."""
    roles = {role: c for role, c in s.facts.roles.items() if of_ray(role)}
    died = {role: e for role, c in roles.items() if (e := c.event("exit")) is not None}
    stopped = {r: c.state for r, c in roles.items() if c.state and c.state.state in "TXZ"}
    if died:
        text = next(iter(died.values())).text
        return conclude(
            s,
            "missing_rank",
            text,
            roles=list(died),
            sure="told",
            evidence=[event.place for event in died.values()][:6],
            remedy="read the end of its log in Ray's session folder, and dmesg of its node",
            blame="environment",
        )
    if not stopped:
        return None
    ended = {r for r, state in stopped.items() if state and state.state in "XZ"}
    named = sorted(ended) or sorted(stopped)
    how = "ended: its process is gone" if ended else "is stopped (process state T)"
    return conclude(
        s,
        "missing_rank",
        f"{', '.join(named[:4])} {how}",
        roles=named,
        sure="told",
        evidence=[state.place for r in named if (state := stopped[r])],
        remedy="find who sent SIGSTOP; kill -CONT lets the run go on" if not ended else "",
        blame="environment",
    )


# What an actor stands in that works, and nobody else of the job has something to do.
_CAUSES: dict[str, Cause] = {
    "user": "user_code",
    "busy": "user_code",
    "storage": "storage",
    "dataloader": "dataloader",
    "compile": "rank_busy",
}


def actor_works_alone(s: Situation) -> Hypothesis | None:
    """A minority runs a method, at one place in every sample, while the others wait for work.

    Who waits for an answer of another actor or stands in a call of its group is not such a one.
    """
    actors = _actors(s)
    positions = {node: position_of(c) for node, c in actors.items()}
    idle = [node for node, p in positions.items() if p.kind == "idle"]
    works = [node for node, p in positions.items() if p.kind in _CAUSES and not _asks(p)]
    # Others that stand in calls are judged by the rules of ranks.
    if not idle or not works or len(idle) + len(works) < len(actors) - _asking(positions):
        return None
    if 2 * len(works) > len(actors) or not all(_stands(actors[node]) for node in works):
        return None
    first = positions[works[0]]
    return conclude(
        s,
        _CAUSES[first.kind],
        f"{_names(works)} {'runs' if len(works) == 1 else 'run'} {first.where}, while "
        f"{len(idle)} other actors wait for work",
        ranks=[node for node in works if isinstance(node, int)],
        roles=[node for node in works if isinstance(node, str)],
        sure="seen",
        evidence=[p for node in works if (p := positions[node].place)][:6],
        waits=[Block(["driver"], works, "returned from its method")],
    )


def _asking(positions: dict[Node, Position]) -> int:
    """Actors that wait for an answer of another one."""
    return sum(map(_asks, positions.values()))


def _asks(position: Position) -> bool:
    """Inside of `ray.get` or `ray.wait`; the loop that runs every actor is in the same file."""
    asked = (f for f in position.path if f.file.endswith("ray/_private/worker.py"))
    return any(frame.function != "main_loop" for frame in asked)


def _stands(component: ComponentFacts) -> bool:
    """In one method in every sample, of which there are two at least: a loop moves within it."""
    users = {st.sample: user_frames(st.main.frames) for st in component.stacks if st.main}
    methods = {(rows[0].function, rows[0].file) if rows else None for rows in users.values()}
    return len(users) > 1 and len(methods) == 1 and None not in methods


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(map(name_of, nodes[:4])) + (" and others" if len(nodes) > 4 else "")
