"""`shakedown status RUN_DIR`: what a run is doing now, once or every few seconds."""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from shakedown.errors import ExitCode, ShakedownError, UsageError
from shakedown.hang.heartbeat import read_heartbeats
from shakedown.paths import AttemptPaths
from shakedown.reports.collect import collect
from shakedown.reports.terminal import Pulse, render
from shakedown.reports.view import RunView, ServerView
from shakedown.serving.engines import get_engine
from shakedown.serving.ready import health_fault

PROBE_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder, results/<run>")
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="repeat every so many seconds, until Ctrl-C"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the run was shown: the view reports, the gates judge."""
    if args.watch is not None and not 0 < args.watch < float("inf"):
        raise UsageError(f"--watch {args.watch}: expected a number of seconds above 0")
    try:
        _show(args.run_dir)
        while args.watch is not None:
            time.sleep(args.watch)
            print("\033[2J\033[H" if sys.stdout.isatty() else "", end="\n")
            _show(args.run_dir)
    except KeyboardInterrupt:
        if args.watch is None:
            raise
    return int(ExitCode.OK)


def _show(run_dir: Path) -> None:
    view = collect(run_dir)
    servers = {server.name: _probe(server) for server in view.servers if server.endpoint}
    print(render(view, _pulses(view), servers), flush=True)


def _pulses(view: RunView) -> Mapping[str, list[Pulse]]:
    """Heartbeats of the newest attempt of every stage that is under way."""
    return {
        stage.name: [
            Pulse(beat.name, beat.phase, beat.step, beat.wall)
            for beat in read_heartbeats(AttemptPaths(stage.newest.root).heartbeats)
        ]
        for stage in view.stages
        if stage.newest is not None and stage.newest.outcome is None
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
