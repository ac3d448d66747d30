"""`shakedown logs RUN_DIR`: the logs of a stage of the workflow, each line with its component.

`--follow` ends with the stage (the attempt of a training stage), or with Ctrl-C.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shakedown.commands.arguments import positive
from shakedown.core.errors import ExitCode, UsageError
from shakedown.core.paths import RunPaths
from shakedown.report.logs import LogFollower, merged
from shakedown.report.stage_logs import StageLogs, find_logs, find_stage

_POLL_SECONDS = 0.5
_FOLLOWED_TAIL = 20


EXAMPLES = (
    "shakedown logs results/demo --follow",
    "shakedown logs results/demo --stage grpo --component 'trainer-*,slurm-*' --tail 50",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder, results/<run>")
    parser.add_argument(
        "--stage",
        help="a training stage, or assets, preflight, serve, agents, "
        "consistency, report (default: the one that wrote last)",
    )
    parser.add_argument(
        "--attempt", type=positive, help="attempt of a training stage (default: the newest)"
    )
    parser.add_argument(
        "--component",
        default="",
        help="comma-separated names or patterns: trainer-rank0,orchestrator, 'trainer-*', or "
        "'slurm-*' for the Slurm job's own output (default: all that do not repeat another)",
    )
    parser.add_argument(
        "--tail",
        type=positive,
        metavar="N",
        help=f"show the last N lines of each log (default: all; {_FOLLOWED_TAIL} with --follow)",
    )
    parser.add_argument("--follow", action="store_true", help="keep showing new lines")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the logs have been shown."""
    paths = RunPaths(args.run_dir)
    stage = find_stage(paths, args.stage, args.attempt)
    patterns = [name for part in args.component.split(",") if (name := part.strip())]
    ended = stage.has_ended  # asked before the logs are read, so that their end is not missed
    follow = args.follow and not ended
    logs, follower = find_logs(paths, stage, patterns), LogFollower()
    if not logs and not follow:
        raise UsageError(
            f"{paths.root}: stage {stage.name} has no log yet",
            hint=f"shakedown status {shlex.quote(str(paths.root))}",
        )
    tail = _FOLLOWED_TAIL if args.follow and args.tail is None else args.tail
    if tail is not None:
        for path in logs.values():
            follower.skip_to_tail(path, tail)
    try:
        _print(follower, logs, last=not follow)
        while follow:
            time.sleep(_POLL_SECONDS)
            ended = stage.has_ended
            _print(follower, find_logs(paths, stage, patterns), last=ended)
            follow = not ended
        if args.follow:
            print(f"{_called(stage)} has ended", flush=True)
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return int(ExitCode.OK)


def _called(stage: StageLogs) -> str:
    return f"attempt {stage.attempt.root.name}" if stage.attempt else stage.name


def _print(follower: LogFollower, logs: Mapping[str, Path], *, last: bool) -> None:
    width = max(map(len, logs), default=0)
    for component, lines in merged(follower, logs, last=last):
        # Written in blocks: two writes per line would take most of the time.
        begin = f"{component:{width}} | "
        sys.stdout.write(begin + f"\n{begin}".join(lines) + "\n")
    sys.stdout.flush()
