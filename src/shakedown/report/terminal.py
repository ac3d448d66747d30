"""A run for a person at a terminal: pure, plain ASCII, no colours that a log would keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shakedown.report import text
from shakedown.report.summary import Headline, WorkflowStep, headline, workflow_steps, worst
from shakedown.report.view import RunView, StageView, State

_MARKS: Mapping[State, str] = {"PASS": "ok", "RUNNING": "running", "NOT RUN": "-"}
# Columns of the last metrics row, in reading order.
_METRICS = ("reward_mean", "loss", "staleness_max", "k3", "entropy", "grad_norm", "seconds")
_BAR = 24


@dataclass(frozen=True)
class Pulse:
    """The last heartbeat of one component; `wall` is Unix time in seconds."""

    name: str
    phase: str
    step: int
    wall: float


def render(view: RunView, pulses: Mapping[str, Sequence[Pulse]], servers: Mapping[str, str]) -> str:
    """The run as text.

    Args:
        view: the run.
        pulses: heartbeats of the newest attempt, by stage.
        servers: what a probe of each server's endpoint said, by server.
    """
    steps = workflow_steps(view)
    groups = [list(part) for _, part in groupby(steps, key=lambda step: step.anchor)]
    width = max(len(_name(group[0])) for group in groups)
    lines = [*_top(view, headline(view, steps)), ""]
    for group in groups:
        lines.append(_line(group, width))
        stage = group[0].stage
        if stage is not None and group[0].state == "RUNNING":
            lines += _details(stage, pulses.get(stage.name, ()), view.now)
        lines += [
            f"          {_flat(said, 300)}"
            for name, said in servers.items()
            if _is_server(group[0], name)
        ]
    lines += [f"  unreadable: {item.path}: {item.reason}" for item in view.unreadable]
    return text.printable("\n".join(lines))


def _top(view: RunView, top: Headline) -> list[str]:
    lines = [f"{view.name}: {top.state}: {_flat(top.title)}", f"  {_flat(top.sentence, 600)}"]
    for label, value in (("culprit", top.culprit), ("remedy", top.remedy), ("next", top.next)):
        if value:
            lines.append(f"  {label}: {_flat(value, 600)}")
    return lines


def _line(group: Sequence[WorkflowStep], width: int) -> str:
    state = worst([step.state for step in group])
    told = next((r.sentence for r in group if r.state == state and r.sentence), "")
    gates = ", ".join(f"{r.name} {_mark(r.state)}" for r in group if r.stage is not None)
    said = ": ".join(part for part in (gates, _flat(told)) if part)
    return f"  {_mark(state):7} {_name(group[0]):{width}}  {said}".rstrip()


def _details(stage: StageView, pulses: Sequence[Pulse], now: float) -> list[str]:
    lines = []
    if stage.planned_steps:
        share = min(1.0, (stage.step or 0) / stage.planned_steps)
        filled = int(share * _BAR)
        bar = "#" * filled + "." * (_BAR - filled)
        lines.append(f"[{bar}] {share:.0%}, step {stage.step or 0:,} of {stage.planned_steps:,}")
    last = [
        f"{name} {text.number(stage.metrics[name].last)}"
        for name in _METRICS
        if name in stage.metrics
    ]
    if last:
        lines.append("  ".join(last))
    width = max((len(pulse.name) for pulse in pulses), default=0)
    lines += [
        f"{pulse.name:{width}}  {pulse.phase}, step {pulse.step:,}, "
        f"beat {text.duration(max(0.0, now - pulse.wall))} ago"
        for pulse in pulses
    ]
    return [f"          {line}" for line in lines]


def _mark(state: State) -> str:
    return _MARKS.get(state, state)


def _name(step: WorkflowStep) -> str:
    return step.stage.name if step.stage is not None else step.name


def _is_server(step: WorkflowStep, name: str) -> bool:
    return step.anchor == f"serve-{name}"


def _flat(value: str, limit: int = 160) -> str:
    return text.shorten(" ".join(value.split()), limit).replace("…", "...")
