"""The command line: start, stop, env, status, daemon, run."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from private_slurm import cluster, control
from private_slurm.config import ACCOUNTING
from private_slurm.errors import UNKNOWN, USAGE, ClusterError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; its exit code, 2 for a wrong request, 3 for what could not be done."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:cut])
    arguments.command = words[cut + 1 :]
    try:
        code: int = arguments.run(arguments)
    except ClusterError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return UNKNOWN
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm_cluster.py",
        description="A private Slurm cluster in one folder, for trials and tests.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, help_line in (
        ("start", _start, "start a cluster and wait until its nodes are idle"),
        ("stop", _stop, "end every process of the cluster"),
        ("env", _env, "print the lines that point a shell at the cluster"),
        ("status", _status, "say which daemons live; exit 1 when one does not"),
        ("daemon", _daemon, "end, freeze or bring back one daemon, to inject a fault"),
        ("run", _run, "start, run the command after --, always stop; exit with its code"),
    ):
        sub = commands.add_parser(
            name, help=help_line, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.add_argument("folder", type=Path, metavar="DIR", help="the cluster's folder")
        sub.set_defaults(run=run)
        if name in ("start", "run"):
            _add_options(sub)
        if name == "daemon":
            sub.add_argument("action", choices=control.ACTIONS, help="what to do to it")
            sub.add_argument("name", help="as status prints it: slurmctld, slurmd-n2, ...")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--accounting", choices=ACCOUNTING, default="db", help="slurmdbd, a text file, or none")
    add("--nodes", type=int, default=4, help="slurmd daemons, four fake GPUs each")
    add("--cpus", type=int, default=4, help="CPUs that each node claims")
    add("--memory-mb", type=int, default=16000, help="memory that each node claims")
    add("--base-port", type=int, default=0, help="first of the ports; 0 probes free ones")
    add("--first-job-id", type=int, default=0, help="0 takes one that was not used before")
    help_line = "each node in a network namespace with a host name and an address (needs root)"
    add("--own-networks", action="store_true", help=help_line)
    help_line = "a further line of slurm.conf; may be repeated"
    add("--set", dest="settings", action="append", default=[], metavar="NAME=V", help=help_line)


def _started(arguments: argparse.Namespace) -> cluster.Cluster:
    return cluster.start(
        arguments.folder,
        accounting=arguments.accounting,
        nodes=arguments.nodes,
        cpus=arguments.cpus,
        memory_mb=arguments.memory_mb,
        base_port=arguments.base_port,
        first_job_id=arguments.first_job_id,
        own_networks=arguments.own_networks,
        settings=arguments.settings,
    )


def _start(arguments: argparse.Namespace) -> int:
    with _terminated_as_interrupt():
        started = _started(arguments)
    print(f"{len(started.plan.nodes)} nodes are idle; point a shell at them by:", file=sys.stderr)
    _print_environment(started.environment)
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    cluster.stop(arguments.folder)
    return 0


def _env(arguments: argparse.Namespace) -> int:
    _print_environment(cluster.load(arguments.folder).environment)
    return 0


def _print_environment(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


def _status(arguments: argparse.Namespace) -> int:
    health = cluster.status(arguments.folder)
    for name in health.alive:
        print(f"alive {name}")
    for name in health.dead:
        print(f"dead  {name}")
    for line in health.nodes:
        print(f"node  {line}")
    return 1 if health.dead or not health.alive else 0


def _daemon(arguments: argparse.Namespace) -> int:
    control.ACTIONS[arguments.action](arguments.folder, arguments.name)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command
    if not command:
        raise ClusterError("run: give a command after --", exit_code=USAGE)
    with _terminated_as_interrupt():
        started = _started(arguments)
    try:
        return _run_command(command, started.environment)
    finally:
        cluster.stop(arguments.folder)


def _run_command(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run `command` in its own session, so that each signal reaches it once, by our hand."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    try:
        child = subprocess.Popen(command, env={**outer, **variables}, start_new_session=True)
    except OSError as error:
        raise ClusterError(f"cannot run {command[0]}: {error.strerror}", exit_code=USAGE) from error

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        code = child.wait()
    finally:
        # While the cluster stops, a further signal must not leave it half alive.
        for number in before:
            signal.signal(number, signal.SIG_IGN)
    return 128 - code if code < 0 else code


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM while starting unwinds like Ctrl-C, so that what was started is ended."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
