"""`shakedown debug`: debuggers for the processes of a run, and profiles of its workers.

`debug nsys` lists the profiles of a run, or runs a command with its workers profiled. It ends with
the command's own exit code.
"""

import argparse
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shakedown.commands.arguments import ActionParsers, above_zero, run_action, whole
from shakedown.core.errors import CannotJudgeError, ExitCode, LaunchError, UsageError
from shakedown.core.paths import RunPaths

if TYPE_CHECKING:
    from shakedown.debug.paused_processes import PausedProcess

EXAMPLES = (
    "shakedown debug attach results/demo",
    "shakedown debug nsys --workers '*policy*' --steps 3:5 -- shakedown train sft --config my.yaml",
)
_LOOK_SECONDS = 0.3
run = run_action


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sub-commands; only the chosen one's modules are imported."""
    actions = ActionParsers(parser)
    _attach_arguments(
        actions.add(
            "attach",
            _attach,
            "List the processes that wait for a debugger, and attach to them or resume them.",
            EXAMPLES[0],
            "shakedown debug attach 1234 --continue all",
        )
    )
    _nsys_arguments(
        actions.add(
            "nsys",
            _nsys,
            "List a run's profiles, or profile a command's workers by nsys or torch's profiler.",
            "shakedown debug nsys results/demo",
            "shakedown debug nsys --workers '*rank1' --steps 3:5 -- torchrun train.py --lr 0.1",
        )
    )


def _attach_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN|JOB", help="folder of a run, stage or attempt, or a Slurm job id"
    )
    act = parser.add_mutually_exclusive_group()
    act.add_argument(
        "--terminal",
        metavar="RANK",
        help="debug this rank (or process name or pid) in this terminal",
    )
    act.add_argument(
        "--continue",
        dest="let_go",
        nargs="+",
        metavar="RANK",
        help="resume these processes ('all' for every one)",
    )
    act.add_argument(
        "--ray", action="store_true", help="show how to reach the Ray debugger of a job"
    )
    parser.add_argument(
        "--launch",
        type=Path,
        default=Path(".vscode/launch.json"),
        metavar="FILE",
        help="VS Code launch file to add an entry to for each process",
    )
    parser.add_argument(
        "--map",
        nargs="+",
        default=[],
        metavar="REMOTE=LOCAL",
        help="map a folder that VS Code sees under another path, as in a container",
    )
    parser.add_argument(
        "--login", metavar="HOST", help="the login node in the ssh lines (default: this machine)"
    )
    parser.add_argument(
        "--wait",
        type=above_zero,
        metavar="SECONDS",
        help="wait up to this long for a process to stop, if none has yet",
    )
    parser.add_argument(
        "--dashboard-port",
        type=whole(1, 65535),
        default=8265,
        metavar="PORT",
        help="Ray dashboard port on the head node (with --ray)",
    )


def _nsys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", metavar="PATTERNS", help="comma-separated name patterns, such as '*policy*'"
    )
    parser.add_argument(
        "--steps",
        metavar="START:STOP",
        help="profile from step START (counted from 1) up to but not including STOP; or `all`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("profiles"),
        metavar="DIR",
        help="folder for a command's profiles (a stage's go to its attempt)",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN_OR_COMMAND",
        help="a run's folder; or, after `--`, the command to run",
    )


def _attach(args: argparse.Namespace) -> int:
    if args.ray:
        return _ray(args)
    folders = _folders(args.run)
    stops = _wait(folders, args.wait)
    if args.let_go:
        return _continue(folders, stops, args.let_go)
    if args.terminal:
        return _terminal(stops, args.terminal)
    return _show(args, [stop for _, stop in stops])


def _folders(run_or_job: str) -> list[Path]:
    from shakedown.core.paths import expand_home
    from shakedown.debug.attach import debug_folders

    if _is_job(run_or_job):
        from shakedown.debug.attach_job import read_job

        folders = list(read_job(run_or_job).folders)
    else:
        folders = debug_folders(Path(expand_home(run_or_job)))
    if not folders:
        raise UsageError(
            f"{run_or_job} was not started with debugging: no process in it listens for a debugger",
            hint="shakedown train STAGE --config FILE --debug, shakedown agent run ... --debug, or "
            "SHAKEDOWN_DEBUG=1 snakemake ...",
        )
    return folders


def _is_job(text: str) -> bool:
    """A run may also be called 1234; then its folder is meant."""
    return text.isascii() and text.isdecimal() and not Path(text).is_dir()


def _wait(folders: list[Path], seconds: float | None) -> "list[tuple[Path, PausedProcess]]":
    from shakedown.debug.attach import standing

    deadline = time.monotonic() + (seconds or 0.0)
    while not (found := standing(folders)) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return found


def _show(args: argparse.Namespace, stops: "list[PausedProcess]") -> int:
    from shakedown.debug.attach import (
        launch_entries,
        parse_mapping,
        ssh_lines,
        write_launch,
    )
    from shakedown.debug.paused_processes import describe

    mapped = dict(map(parse_mapping, args.map))
    if not stops:
        print("no process is waiting for a debugger; --wait SECONDS waits for one", flush=True)
        return int(ExitCode.OK)
    for stop in stops:
        held = "; a debugger is attached" if stop.attached else ""
        print(f"{describe(stop)}{held}")
    write_launch(args.launch, launch_entries(stops, mapped))
    print(f"VS Code: Run and Debug has an entry for each, from {args.launch}")
    print("first, on the machine where VS Code runs (through the login node):")
    here = socket.gethostname()
    full = socket.getfqdn()
    # A machine that does not know its own name takes that of its loopback.
    login = args.login or (here if full.startswith("localhost") else full)
    for line in ssh_lines(stops, login, here):
        print(f"  {line}")
    name = stops[0].name if stops[0].rank is not None else str(stops[0].pid)
    print(f"or here: shakedown debug attach {args.run} --terminal {name}")
    print(f"to resume: shakedown debug attach {args.run} --continue all", flush=True)
    return int(ExitCode.OK)


def _continue(
    folders: list[Path], stops: "list[tuple[Path, PausedProcess]]", wanted: list[str]
) -> int:
    from shakedown.core.folders import storage_errors
    from shakedown.debug.attach import choose, standing
    from shakedown.debug.paused_processes import SILENT_SECONDS, let_go

    chosen = choose(stops, wanted)
    for folder, stop in chosen:
        with storage_errors("write", folder):
            let_go(folder, [stop])
    # It may stop again at once, in a loop: that is another stop, of a later moment.
    left = [(stop.pid, stop.since) for _, stop in chosen]
    deadline = time.monotonic() + SILENT_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = {(stop.pid, stop.since) for _, stop in standing(folders)}
        left = [one for one in left if one in now]
    if left:
        pids = ", ".join(str(pid) for pid, _ in left)
        raise CannotJudgeError(f"still paused after {SILENT_SECONDS:.0f} s: pid {pids}")
    print(f"{len(chosen)} process(es) resumed", flush=True)
    return int(ExitCode.OK)


def _terminal(stops: "list[tuple[Path, PausedProcess]]", wanted: str) -> int:
    from shakedown.debug.attach import choose
    from shakedown.debug.debugger_client import DebugClient
    from shakedown.debug.terminal import HELP, Terminal

    chosen = [stop for _, stop in choose(stops, [wanted])]
    if len(chosen) != 1:
        names = ", ".join(f"{stop.name} (pid {stop.pid})" for stop in chosen)
        raise UsageError(f"--terminal {wanted}: expected one process, not {names or 'none'}")
    print(HELP, flush=True)
    with DebugClient(chosen[0]) as client:
        Terminal(client, input, lambda text: print(text, flush=True)).run()
    return int(ExitCode.OK)


def _ray(args: argparse.Namespace) -> int:
    from shakedown.debug.attach_job import ray_lines, read_job

    if not _is_job(args.run):
        raise UsageError(f"--ray {args.run!r:.100}: expected a Slurm job id", hint="squeue --me")
    job = read_job(args.run)
    print("\n".join(ray_lines(job, args.dashboard_port)), flush=True)
    return int(ExitCode.FAIL if "legacy" in job.ray_debug else ExitCode.OK)


def _nsys(args: argparse.Namespace) -> int:
    words: list[str] = args.words
    if args.workers is not None and args.steps is not None and words:
        return _profile(args.workers, args.steps, args.out, words)
    if args.workers is None and args.steps is None and len(words) == 1:
        return _list(Path(words[0]))
    raise UsageError(
        "expected a run's folder, or --workers, --steps and a command after `--`",
        hint="shakedown debug nsys --help",
    )


def _profile(workers: str, steps: str, out: Path, command: Sequence[str]) -> int:
    from shakedown.profiling.capture import OPTIMIZER
    from shakedown.profiling.launch import PATTERNS, STEPS, launch, order_of, requested
    from shakedown.profiling.profiles import lines, read_records

    # The started command reads them from its environment, as our own stages and NeMo RL do.
    os.environ.update({PATTERNS: workers, STEPS: steps})
    profile = requested(os.environ)
    assert profile is not None  # noqa: S101 - both variables were set just now
    if Path(command[0]).name == "shakedown":
        return _become(command)
    order = order_of(profile, worker="command", component="command", target=out, steps_by=OPTIMIZER)
    code = launch(order, command, forward=True)
    for record in read_records(out)[0]:
        if record.pid == os.getpid():
            for text in lines(record, out):
                print(text)
    return code if code >= 0 else 128 - code


def _become(command: Sequence[str]) -> int:
    """It profiles the workers of its stages itself."""
    try:
        os.execvp(command[0], list(command))  # noqa: S606
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


def _list(root: Path) -> int:
    from shakedown.profiling.profiles import lines, read_records

    if not root.is_dir():
        raise UsageError(f"{root} is not a folder: expected a run's results, such as results/demo")
    attempts = RunPaths(root).stages.glob("*/attempts/*/profiles")
    found = 0
    for folder in (root, *sorted(attempts)):
        records, faults = read_records(folder)
        found += len(records) + len(faults)
        for text in (*faults, *(text for each in records for text in lines(each, folder))):
            print(text)
    if not found:
        print(
            f"no profiles in {root}; to record some: shakedown debug nsys --workers '*policy*' "
            "--steps 3:5 -- shakedown train STAGE --config FILE"
        )
    return int(ExitCode.OK)
