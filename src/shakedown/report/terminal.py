"""A run as terminal text: plain ASCII without colours, so that logs stay readable. Pure."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from shakedown.core.visible import masked
from shakedown.progress.signs import Beat
from shakedown.report import text
from shakedown.report.series import as_number
from shakedown.report.summary import Headline, WorkflowStep, headline, workflow_steps, worst
from shakedown.report.view import RunView, StageState, StageView

_MARKS: Mapping[StageState, str] = {
    "PASS": "ok",
    "RUNNING": "running",
    "PENDING": "pending",
    "NOT RUN": "-",
}
# Columns of the last metrics row, in display order.
_METRICS = ("reward_mean", "loss", "staleness_max", "k3", "entropy", "grad_norm", "seconds")
_BAR = 24  # characters


def render(
    view: RunView,
    beats: Mapping[str, Sequence[Beat]],
    servers: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """The run as text.

    Args:
        view: the run.
        beats: heartbeats of the newest attempt, by stage.
        servers: the answer of each server's probe, by server.
        notes: further remarks, such as that Slurm did not answer.
    """
    steps = workflow_steps(view)
    groups = [list(part) for _, part in groupby(steps, key=lambda step: step.anchor)]
    width = max(len(_name(group[0])) for group in groups)
    lines = _top(view, headline(view, steps))
    lines += [*(f"  note: {_flat(note, 600)}" for note in notes), ""]
    for group in groups:
        lines.append(_line(group, width))
        stage = group[0].stage
        if stage is not None and group[0].state == "RUNNING":
            lines += _details(stage, beats.get(stage.name, ()), view.now)
        lines += [
            f"          {_flat(said, 300)}"
            for name, said in servers.items()
            if _is_server(group[0], name)
        ]
    lines += [f"  unreadable: {item.path}: {item.reason}" for item in view.unreadable]
    return masked("\n".join(lines))


def painted(shown: str, columns: int, rows: int, *, clear: bool) -> str:
    """The text drawn over the previous one, line by line, without flicker or scrolling."""
    lines = [line[: max(1, columns - 1)] for line in shown.split("\n")]
    if len(lines) > rows - 1:
        kept = max(1, rows - 2)
        lines = [*lines[:kept], f"... {len(lines) - kept} more lines: enlarge the terminal"]
    body = "".join(f"{line}\033[K\n" for line in lines)
    return ("\033[2J" if clear else "") + f"\033[H{body}\033[J"


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


def _details(stage: StageView, beats: Sequence[Beat], now: float) -> list[str]:
    lines = []
    if stage.planned_steps:
        share = min(1.0, (stage.step or 0) / stage.planned_steps)
        filled = int(share * _BAR)
        bar = "#" * filled + "." * (_BAR - filled)
        lines.append(f"[{bar}] {share:.0%}, step {stage.step or 0:,} of {stage.planned_steps:,}")
    row = stage.rows.get(stage.step or 0, {})
    cells = [(name, as_number(row.get(name))) for name in _METRICS]
    last = [f"{name} {text.number(value)}" for name, value in cells if not math.isnan(value)]
    if last:
        lines.append("  ".join(last))
    width = max((len(beat.name) for beat in beats), default=0)
    lines += [
        f"{beat.name:{width}}  {beat.phase}, step {beat.step:,}, "
        f"beat {text.duration(max(0.0, now - beat.wall))} ago"
        for beat in beats
    ]
    return [f"          {line}" for line in lines]


def _mark(state: StageState) -> str:
    return _MARKS.get(state, state)


def _name(step: WorkflowStep) -> str:
    return step.stage.name if step.stage is not None else step.name


def _is_server(step: WorkflowStep, name: str) -> bool:
    return step.anchor == f"serve-{name}"


def _flat(value: str, limit: int = 160) -> str:
    return text.shorten(" ".join(value.split()), limit).replace("…", "...")
