"""`shakedown status RUN_DIR`: what a run is doing now, once or every few seconds.

From the run's files, one question to Slurm and a request to each persistent server (not with
--no-probe).
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shakedown.core.errors import ExitCode, UsageError
from shakedown.core.visible import unguarded
from shakedown.report import status
from shakedown.report.terminal import painted

_WATCH_SECONDS = 5.0
EXAMPLES = (
    "shakedown status results/demo",
    "shakedown status results/demo --watch 10",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder, results/<run>")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help=f"repeat every so many seconds ({_WATCH_SECONDS:g} without a number), until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="for programs: one line each time")
    parser.add_argument("--no-probe", action="store_true", help="do not ask Slurm and the servers")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the run was shown: the view reports, the gates judge."""
    if args.watch is not None and not 0 < args.watch < float("inf"):
        raise UsageError(f"--watch {args.watch}: expected a number of seconds above 0")
    # Only a terminal is drawn over; a file gets one look after the other.
    redraw = args.watch is not None and not args.json and sys.stdout.isatty()
    try:
        for first in _rounds(args.watch):
            found = status.look(args.run_dir, probe=not args.no_probe)
            if args.json:
                print(json.dumps(status.as_json(found), allow_nan=False), flush=True)
                continue
            shown = status.as_text(found)
            if redraw:
                frame = painted(shown, *shutil.get_terminal_size(), clear=first)
                # `as_text` is visible already; what moves the cursor is our own.
                print(frame, end="", file=unguarded(sys.stdout), flush=True)
            else:
                print(shown if first else f"\n{shown}", flush=True)
    except KeyboardInterrupt:  # ends a watch, but interrupts a single look
        if args.watch is None:
            raise
    return int(ExitCode.OK)


def _rounds(every: float | None) -> Iterator[bool]:
    """Once, or without end; True the first time."""
    yield True
    while every is not None:
        time.sleep(every)
        yield False
