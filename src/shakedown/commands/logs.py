"""`shakedown logs RUN_DIR`: all logs of an attempt as one, by time, each line with its component.

Times are UTC and those of the supervisor's looks at the logs, about a second apart; `-` where it
did not look. `--follow` ends with the attempt, or with Ctrl-C.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from shakedown.commands.arguments import positive
from shakedown.errors import ExitCode, UsageError, did_you_mean
from shakedown.paths import AttemptPaths, RunPaths, StagePaths
from shakedown.training.observe.log_times import Log
from shakedown.training.observe.merged_logs import Follower, Line, find, merge, whole_lines

_POLL_SECONDS = 0.5
_FOLLOWED_TAIL = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder, results/<run>")
    parser.add_argument("--stage", help="a training stage (default: the one that ran last)")
    parser.add_argument("--attempt", type=positive, help="its number (default: the newest)")
    parser.add_argument(
        "--component",
        default="",
        help="names or patterns, separated by commas: trainer-rank0,orchestrator or 'trainer-*'",
    )
    parser.add_argument(
        "--tail",
        type=positive,
        metavar="N",
        help=f"the last N lines (default: all, with --follow the last {_FOLLOWED_TAIL})",
    )
    parser.add_argument("--follow", action="store_true", help="go on with what is added")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the logs were shown."""
    attempt = _attempt(_stage(RunPaths(args.run_dir), args.stage), args.attempt)
    patterns = [name for part in args.component.split(",") if (name := part.strip())]
    ended = attempt.outcome.exists()  # asked before the logs are read: none of their end is missed
    logs = find(attempt, patterns)
    if args.follow and not ended:
        logs = whole_lines(logs)
    width = max(map(len, logs), default=0)
    tail = _FOLLOWED_TAIL if args.follow and args.tail is None else args.tail
    try:
        _print(merge(attempt, logs, tail), width)
        if args.follow and not ended:
            _follow(attempt, patterns, logs, width)
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return int(ExitCode.OK)


def _follow(
    attempt: AttemptPaths, patterns: list[str], logs: Mapping[str, Log], width: int
) -> None:
    follower = Follower(attempt, patterns, {name: log.size for name, log in logs.items()})
    ended = False
    while not ended:
        time.sleep(_POLL_SECONDS)
        ended = attempt.outcome.exists()
        while lines := follower.poll(time.time(), last=ended):
            _print(lines, width)
    print(f"attempt {attempt.root.name} has ended", flush=True)


def _print(lines: Iterable[Line], width: int) -> None:
    for line in lines:
        print(f"{_clock(line.time)} {line.component:{width}} | {line.text}")
    sys.stdout.flush()


def _clock(moment: float | None) -> str:
    unknown = f"{'-':14}"
    if moment is None:
        return unknown
    try:
        return datetime.fromtimestamp(moment, UTC).strftime("%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # a damaged file's year 300000
        return unknown


def _stage(paths: RunPaths, wanted: str | None) -> StagePaths:
    """The stage that was asked for, else the one whose newest attempt is the newest of all."""
    if not paths.root.is_dir():
        raise UsageError(
            f"{paths.root} is not a folder: expected a run's results, such as results/demo"
        )
    folders = sorted(paths.stages.iterdir()) if paths.stages.is_dir() else []
    begun = {f.name: paths.stage(f.name) for f in folders if paths.stage(f.name).attempt_numbers()}
    if wanted is not None and wanted not in begun:
        known = ", ".join(begun) or "none"
        raise UsageError(
            f"{paths.root} has no attempt of a stage {wanted!r}{did_you_mean(wanted, begun)}; "
            f"begun: {known}"
        )
    if not begun:
        raise UsageError(f"{paths.root}: no training stage has begun", hint="shakedown status RUN")
    return begun[wanted] if wanted is not None else max(begun.values(), key=_begun)


def _begun(stage: StagePaths) -> float:
    try:
        return stage.attempt(stage.attempt_numbers()[-1]).root.stat().st_mtime
    except OSError:  # a folder that is no attempt of ours, such as `7`
        return 0.0


def _attempt(stage: StagePaths, wanted: int | None) -> AttemptPaths:
    numbers = stage.attempt_numbers()
    if wanted is not None and wanted not in numbers:
        known = ", ".join(map(str, numbers))
        raise UsageError(f"stage {stage.root.name} has no attempt {wanted}; it has: {known}")
    return stage.attempt(wanted or numbers[-1])
