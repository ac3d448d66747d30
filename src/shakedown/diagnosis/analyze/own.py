"""What each finding says of its own subject: what was seen of it and where that stands."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from shakedown.diagnosis.analyze.graph import name_of
from shakedown.diagnosis.analyze.model import Diagnosis, Hypothesis, name_ranks
from shakedown.diagnosis.analyze.position import position_of
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.records import SourceRef


class _Placed(Protocol):
    """Any record of a component."""

    @property
    def place(self) -> SourceRef: ...


def measured_of(scope: str, subject: str, diagnosis: Diagnosis, facts: Facts) -> str:
    """One line: a rank's place, counters and waiters; a role's state; the classes of a cluster."""
    component = _component(scope, subject, facts)
    if component is not None:
        awaited = sorted(
            {name_of(w.waiter) for w in diagnosis.waits if name_of(w.awaited) == component.name}
        )
        rows = [*_seen(component), *_counters(component, facts)]
        if awaited:
            few = ", ".join(awaited[:3])
            rows.append(f"awaited by {few if len(awaited) < 4 else f'{len(awaited)} others'}")
        return "; ".join(rows) or "no evidence of it"
    if scope == "node":
        rows = [f"{n.node}: {n.state}" for n in facts.nodes if n.node == subject]
        return "; ".join(rows[:2]) or "named in a log"
    if scope in ("rank", "role"):
        return "no evidence of it"
    rows = [f"{name_ranks(row.ranks)}: {row.waiting_in}" for row in diagnosis.classes[:6]]
    return "; ".join(rows) or "no rank was seen"


def places_of(scope: str, subject: str, chosen: Hypothesis, facts: Facts) -> Sequence[SourceRef]:
    """The evidence that speaks of the subject itself; all where none of it does."""
    component = _component(scope, subject, facts)
    if component is None:
        return chosen.evidence
    mine = set(_paths(component))
    # By path and line: two records of one place may quote it differently.
    return [p for p in chosen.evidence if (p.path, p.line) in mine] or chosen.evidence


def _component(scope: str, subject: str, facts: Facts) -> ComponentFacts | None:
    if scope == "rank":
        return facts.ranks.get(int(subject))
    return facts.roles.get(subject) if scope == "role" else None


def _paths(component: ComponentFacts) -> Iterator[tuple[str, int]]:
    records: tuple[_Placed, ...] = (
        *component.stacks, *component.children, *component.states, *component.unattachable,
        *component.beats, *component.flight, *component.events,
        *component.logs, *component.ras,
    )  # fmt: skip
    for record in records:
        yield record.place.path, record.place.line


def _seen(component: ComponentFacts) -> Iterator[str]:
    position = position_of(component)
    if position.kind in ("dead", "stopped"):
        yield f"its process is {position.kind}"
    elif position.path:
        yield f"it is in {position.where}"
    if component.exit_code is not None:
        yield f"exit code {component.exit_code}"
    event = component.event("traceback", "abort", "oom", "nccl_error")
    if event is not None:
        yield event.text
    if component.beat is not None:
        beat = component.beat.beat
        yield f"phase {beat.phase}, step {beat.step}, micro-batch {beat.micro_batch}"


def _counters(component: ComponentFacts, facts: Facts) -> Iterator[str]:
    """The group in which it lags most: the others' newest call against its own."""
    if component.record is None:
        return
    rows = []
    for group in facts.groups:
        view = group.views.get(component.rank)
        if view is not None and len(group.views) > 1:
            most = max(v.enqueued for v in group.views.values())
            behind = f", others {most}" if most > view.enqueued else ""
            text = (
                f"entered {view.enqueued}{behind}, completed {view.completed} calls of "
                f"{group.label}"
            )
            rows.append((most - view.enqueued, text))
    yield from (text for _, text in sorted(rows, key=lambda row: -row[0])[:1])
