"""`shakedown status RUN_DIR`: what a run is doing now, once or every few seconds.

From the run's files, and one request to each persistent server (not with --no-probe).
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from shakedown.core.errors import ExitCode, ShakedownError, UsageError
from shakedown.core.paths import StagePaths
from shakedown.inference.engines import get_engine
from shakedown.inference.ready import health_fault
from shakedown.report import live, text
from shakedown.report.collect import collect
from shakedown.report.live import Live
from shakedown.report.summary import headline, workflow_steps
from shakedown.report.terminal import Pulse, render
from shakedown.report.view import RunView, ServerView

PROBE_SECONDS = 2.0
WATCH_SECONDS = 5.0
SCHEMA = "shakedown/status/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder, results/<run>")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"repeat every so many seconds ({WATCH_SECONDS:g} without a number), until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="for programs: one line each time")
    parser.add_argument("--no-probe", action="store_true", help="do not ask the servers")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the run was shown: the view reports, the gates judge."""
    if args.watch is not None and not 0 < args.watch < float("inf"):
        raise UsageError(f"--watch {args.watch}: expected a number of seconds above 0")
    redraw = args.watch is not None and not args.json and sys.stdout.isatty()
    try:
        for first in _rounds(args.watch):
            shown = _look(args.run_dir, probe=not args.no_probe, as_json=args.json)
            if redraw:
                print(painted(shown, *shutil.get_terminal_size(), clear=first), end="", flush=True)
            else:
                print(shown if first or args.json else f"\n{shown}", flush=True)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    return int(ExitCode.OK)


def painted(shown: str, columns: int, rows: int, *, clear: bool) -> str:
    """The text over the one before it, line by line, so that nothing flickers or scrolls."""
    lines = [line[: max(1, columns - 1)] for line in shown.split("\n")]
    if len(lines) > rows - 1:
        kept = max(1, rows - 2)
        lines = [*lines[:kept], f"... {len(lines) - kept} lines more: enlarge the terminal"]
    body = "".join(f"{line}\033[K\n" for line in lines)
    return ("\033[2J" if clear else "") + f"\033[H{body}\033[J"


def _rounds(every: float | None) -> Iterator[bool]:
    """Once, or without end; True the first time."""
    yield True
    while every is not None:
        time.sleep(every)
        yield False


def _look(run_dir: Path, *, probe: bool, as_json: bool) -> str:
    view = collect(run_dir)
    lives = _lives(view)
    asked = [server for server in view.servers if server.endpoint] if probe else []
    servers = {server.name: _probe(server) for server in asked}
    if as_json:
        return json.dumps(_body(view, lives, servers), allow_nan=False)
    blocks = [render(view, _pulses(lives), servers)]
    blocks += [text.printable("\n".join(live.lines(one))) for one in lives]
    return "\n\n".join(blocks)


def _lives(view: RunView) -> list[Live]:
    """The stages that are under way."""
    return [
        live.look(StagePaths(stage.root), stage.newest.number, stage.planned_steps, view.now)
        for stage in view.stages
        if stage.newest is not None and stage.newest.outcome is None
    ]


def _pulses(lives: Sequence[Live]) -> Mapping[str, list[Pulse]]:
    """Heartbeats of the newest attempt, by stage."""
    return {
        one.name: [Pulse(beat.name, beat.phase, beat.step, beat.wall) for beat in one.beats]
        for one in lives
    }


def _body(view: RunView, lives: Sequence[Live], servers: Mapping[str, str]) -> dict[str, Any]:
    steps = workflow_steps(view)
    under_way = {one.name: live.as_json(one, view.now) for one in lives}
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
        "servers": dict(servers),
        "unreadable": [asdict(item) for item in view.unreadable],
    }


def _probe(server: ServerView) -> str:
    """Ask the server how it is; the sentence says what came back."""
    if server.phase == "ended":
        return "not running"
    url = str(server.endpoint.get("base_url"))
    try:
        engine = get_engine(str(server.endpoint.get("engine")))
        fault = health_fault(engine, url, timeout=PROBE_SECONDS)
    except (ShakedownError, httpx.InvalidURL, ValueError) as error:
        fault = str(error)
    return f"{url} is not well: {fault}" if fault else f"{url} is up and healthy"
