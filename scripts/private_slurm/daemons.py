"""How each daemon of the cluster is started, and how one knows that it is up."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from private_slurm import networks
from private_slurm.config import Plan
from private_slurm.errors import ClusterError
from private_slurm.processes import MARKER, NODE_MARKER, Process, is_alive, spawn, wait_until

_LOG_LINES = 25

# A user's PATH often lacks the folders of the daemons.
SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Daemon:
    """A program in the foreground and the question whether it answers yet.

    `extra`: variables that it gets besides those of `environment`.
    """

    name: str
    command: Sequence[str]
    is_up: Callable[[], bool]
    seconds: float = 20.0
    extra: Mapping[str, str] = field(default_factory=dict)


def environment(plan: Plan) -> dict[str, str]:
    """What every daemon and client of this cluster gets to see."""
    return {
        # Inside a job of another cluster its SLURM_* would mislead this one's daemons.
        **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        "SLURM_CONF": os.fspath(plan.slurm_conf),
        # slurmdbd's client library finds the private database by this.
        "MYSQL_UNIX_PORT": os.fspath(plan.mysql_socket),
        "PATH": SEARCH_PATH,
        MARKER: os.fspath(plan.folder),
    }


def daemons(plan: Plan) -> Iterator[Daemon]:
    """The daemons in the order in which they need each other."""
    yield _munged(plan)
    if plan.accounting == "db":
        yield _mariadbd(plan)
        yield _slurmdbd(plan)
    controller = [*networks.inside(plan, plan.controller), "slurmctld", "-D"]
    yield Daemon("slurmctld", controller, lambda: _succeeds(plan, "scontrol", "ping"))
    for name, port in zip(plan.nodes, plan.node_ports, strict=True):
        command = [*networks.inside(plan, name), "slurmd", "-D", "-N", name]
        up = _listens(port, plan.hosts[name])
        yield Daemon(f"slurmd-{name}", command, up, extra={NODE_MARKER: name})


def _munged(plan: Plan) -> Daemon:
    command = [
        "munged",
        "--foreground",
        # The folder's parents may be writable for a group; the socket is private all the same.
        "--force",
        f"--key-file={plan.etc}/munge.key",
        f"--socket={plan.munge_socket}",
        f"--pid-file={plan.run}/munged.pid",
        f"--log-file={plan.log}/munged.log",
        f"--seed-file={plan.run}/munged.seed",
        "--num-threads=4",
    ]
    socket_path = os.fspath(plan.munge_socket)
    return Daemon("munged", command, lambda: _succeeds(plan, "munge", "-n", "-S", socket_path))


def _mariadbd(plan: Plan) -> Daemon:
    command = [
        "mariadbd",
        "--no-defaults",
        f"--datadir={plan.folder}/db",
        f"--user={plan.user}",
        f"--socket={plan.mysql_socket}",
        f"--pid-file={plan.run}/mariadb.pid",
        "--skip-networking",
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=OFF",
        "--max-connections=40",
    ]
    socket_path = os.fspath(plan.mysql_socket)
    ping = ["mariadb", "--no-defaults", "-S", socket_path, "-e", "select 1"]
    return Daemon("mariadbd", command, lambda: _succeeds(plan, *ping), seconds=60.0)


def _slurmdbd(plan: Plan) -> Daemon:
    listens = _listens(plan.database_port, plan.hosts[plan.controller])
    return Daemon(
        "slurmdbd",
        [*networks.inside(plan, plan.controller), "slurmdbd", "-D"],
        # The port opens before the tables are made.
        lambda: listens() and _succeeds(plan, "sacctmgr", "-n", "list", "cluster"),
        seconds=60.0,
    )


def _listens(port: int, address: str = "127.0.0.1") -> Callable[[], bool]:
    def ask() -> bool:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            return False
        return True

    return ask


def client(plan: Plan, *command: str, seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run one of the cluster's client programs; a timeout counts as exit code 124."""
    try:
        return subprocess.run(
            command,
            env=environment(plan),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"{command[0]} is not installed; run scripts/install_system.sh"
        ) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {seconds:g} s")


def _succeeds(plan: Plan, *command: str) -> bool:
    return client(plan, *command, seconds=10.0).returncode == 0


def launch(plan: Plan, daemon: Daemon) -> Process:
    """Start one daemon without waiting for it.

    Raises:
        ClusterError: its program is not installed.
    """
    out = plan.log / f"{daemon.name}.out"
    variables = {**environment(plan), **daemon.extra}
    try:
        return spawn(daemon.name, daemon.command, variables, out)
    except FileNotFoundError as error:
        raise ClusterError(
            f"{daemon.command[0]} is not installed; run scripts/install_system.sh"
        ) from error


def await_up(plan: Plan, daemon: Daemon, process: Process) -> None:
    """Wait until the daemon answers.

    Raises:
        ClusterError: it ended or does not answer; the message has the end of its log.
    """
    wait_until(lambda: not is_alive(process) or daemon.is_up(), daemon.seconds)
    if not is_alive(process):
        raise ClusterError(f"{daemon.name} ended while starting\n{log_end(plan, daemon.name)}")
    if not daemon.is_up():
        waited = f"{daemon.name} does not answer after {daemon.seconds:g} s"
        raise ClusterError(f"{waited}\n{log_end(plan, daemon.name)}")


def log_end(plan: Plan, name: str) -> str:
    """The last lines of a daemon's own log and of its output, each under its path."""
    parts = []
    for path in (plan.log / f"{name}.log", plan.log / f"{name}.out"):
        with suppress(FileNotFoundError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                parts += [f"--- end of {path}", *lines[-_LOG_LINES:]]
    return "\n".join(parts) or "(it left no log)"
