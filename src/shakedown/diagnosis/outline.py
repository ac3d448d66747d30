"""What the page shows beside the diagnosis: timeline, hosts and quotes, as plain data. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from shakedown.core.ranges import ranges
from shakedown.diagnosis.facts import ComponentFacts, Facts
from shakedown.diagnosis.records import FlightRecord, Operation, SourceRef, Stack
from shakedown.diagnosis.timeline import timeline
from shakedown.stacks.frames import user_frames

MAX_HOSTS = 4096
MAX_QUOTES = 64


def outline(facts: Facts, culprits: Iterable[int], evidence: Sequence[SourceRef]) -> dict[str, Any]:
    """{`timeline`, `hosts`: {host: ranks as text}, `quotes`: {place: what stands there}}."""
    return {
        "timeline": timeline(facts, culprits),
        "hosts": hosts(facts),
        "quotes": quotes(facts, evidence),
    }


def hosts(facts: Facts) -> dict[str, str]:
    """Ranks of each host, as text; empty where no input names a host."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, component in facts.ranks.items():
        if component.host:
            found[component.host].append(rank)
    ordered = sorted(found.items(), key=lambda row: min(row[1]))
    return {host: ranges(ranks, limit=64) for host, ranks in ordered[:MAX_HOSTS]}


def quotes(facts: Facts, evidence: Sequence[SourceRef]) -> dict[str, str]:
    """What dumps and stacks say that are evidence by their file alone."""
    # Logs bring their line as text; a dump or a stack is only named and needs words.
    wanted = {str(p) for p in list(evidence)[:MAX_QUOTES] if not p.text}
    found: dict[str, str] = {}
    for component in [*facts.ranks.values(), *facts.roles.values()]:
        for stack in component.stacks:
            if str(stack.place) in wanted:
                found.setdefault(str(stack.place), _stack(component, stack))
        for record in component.flight:
            if str(record.place) in wanted:
                found.setdefault(str(record.place), _record(component, record))
    return found


def _stack(component: ComponentFacts, stack: Stack) -> str:
    frames = stack.main.frames if stack.main else ()
    if not frames:
        return f"{component.name}: no frames"
    users = user_frames(frames)
    called = f", called from {users[-1]}" if users and users[-1] != frames[-1] else ""
    return f"{component.name}: {frames[-1]}{called}"


def _record(component: ComponentFacts, record: FlightRecord) -> str:
    if not record.operations:
        return f"{component.name}: {len(record.groups)} groups, no entries"
    by_order = sorted(record.operations, key=lambda op: op.order)
    last, undone = by_order[-1], [op for op in by_order if not op.done]
    # Behind the call that holds a GPU others may be enqueued.
    first = f"first open call {_call(undone[0])}; " if undone[:1] not in ([], [last]) else ""
    state = "done" if last.done else "not done"
    return f"{component.name}: {first}last call {_call(last)}, {state}"


def _call(op: Operation) -> str:
    users = user_frames(op.frames)
    where = f" at {users[-1]}" if users else ""
    return f"{op.name.split(':', 1)[-1]}, number {op.seq}{where}"
