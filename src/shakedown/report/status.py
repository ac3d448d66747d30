"""What a run is doing now: its files, the stages under way, and what its servers answer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from shakedown.core.errors import ShakedownError
from shakedown.core.paths import StagePaths
from shakedown.core.visible import masked
from shakedown.inference.engines import get_engine
from shakedown.inference.folder import read_endpoint
from shakedown.inference.ready import health_fault
from shakedown.report import live, terminal
from shakedown.report.collect import collect
from shakedown.report.live import Live
from shakedown.report.summary import headline, workflow_steps
from shakedown.report.view import RunView, ServerView

# Servers are asked one after another, with --watch again and again: none may hold the others up.
PROBE_SECONDS = 2.0
SCHEMA = "shakedown/status/1"


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment: `lives` are the stages under way, `servers` what each one answered."""

    view: RunView
    lives: Sequence[Live]
    servers: Mapping[str, str]


def look(run_dir: Path, *, probe: bool) -> RunStatus:
    """Read the run's files; `probe` asks its servers as well.

    Raises:
        UsageError: `run_dir` is not a folder.
    """
    view = collect(run_dir)
    lives = [
        live.look(StagePaths(stage.root), stage.newest.number, stage.planned_steps, view.now)
        for stage in view.stages
        if stage.newest is not None and stage.newest.outcome is None
    ]
    asked = [server for server in view.servers if server.endpoint] if probe else []
    return RunStatus(view, lives, {server.name: _probe(server) for server in asked})


def as_text(status: RunStatus) -> str:
    """For a person at a terminal."""
    beats = {one.name: one.beats for one in status.lives}
    blocks = [terminal.render(status.view, beats, status.servers)]
    blocks += [masked("\n".join(live.lines(one))) for one in status.lives]
    return "\n\n".join(blocks)


def as_json(status: RunStatus) -> dict[str, Any]:
    """For programs."""
    view = status.view
    steps = workflow_steps(view)
    under_way = {one.name: live.as_json(one, view.now) for one in status.lives}
    return {
        "schema": SCHEMA,
        "run": view.name,
        "time": view.now,
        **asdict(headline(view, steps)),
        "steps": [
            {"name": step.title, "state": step.state, "sentence": step.sentence} for step in steps
        ],
        "stages": [
            {
                "name": stage.name,
                "step": stage.step,
                "steps": stage.planned_steps,
                "outcome": stage.outcome.state if stage.outcome else None,
                "live": under_way.get(stage.name),
            }
            for stage in view.stages
        ],
        "servers": dict(status.servers),
        "unreadable": [asdict(item) for item in view.unreadable],
    }


def _probe(server: ServerView) -> str:
    """Ask the server how it is; the sentence says what came back."""
    if server.phase == "ended":
        return "not running"
    url = str(server.endpoint.get("base_url"))
    fault: object
    try:
        # Read again, as a client does: the server's secret goes to no address that is only shown.
        told = read_endpoint(server.root)
        engine = get_engine(told.engine)
        fault = health_fault(engine, told.base_url, told.api_key(), timeout=PROBE_SECONDS)
    except (ShakedownError, httpx.InvalidURL, ValueError) as error:
        fault = error
    return f"{url} is up and healthy" if fault is None else f"{url} is not well: {fault}"
