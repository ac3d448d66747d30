"""Daemons as processes: start, recognise, end, and prove that they are gone."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# In the environment of every daemon, and by inheritance of every slurmstepd.
MARKER = "PRIVATE_SLURM_FOLDER"
# In the environment of each slurmd and of its slurmstepds.
NODE_MARKER = "PRIVATE_SLURM_NODE"


@dataclass(frozen=True)
class Process:
    """A daemon. `ticks` is its start time since boot: it tells a reused pid from the real one."""

    name: str
    pid: int
    ticks: int


def spawn(name: str, command: Sequence[str], environment: Mapping[str, str], out: Path) -> Process:
    """Start a daemon in its own session; its output is appended to `out`.

    Raises:
        FileNotFoundError: the program is not on the environment's PATH.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise FileNotFoundError(command[0])
    pid = os.posix_spawn(
        program,
        list(command),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.fspath(out), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        # A caller that ignores signals (nohup, a test runner) must not hand that on.
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
        setsigmask=[],
    )
    return Process(name, pid, _stat(pid)[1])


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time in ticks; ("", 0) when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name in brackets may hold anything
    return fields[0], int(fields[19])


def is_alive(process: Process) -> bool:
    """False also for a zombie, which only waits for its parent to read its exit code."""
    state, ticks = _stat(process.pid)
    return state not in ("", "Z", "X") and ticks == process.ticks


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` every 50 ms; False when `seconds` pass first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end(processes: Iterable[Process], *, seconds: float = 10.0) -> list[Process]:
    """SIGTERM to all at once, SIGKILL after `seconds`; returns those that still live."""
    everyone = list(processes)
    rest = [process for process in everyone if is_alive(process)]
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 5.0)):
        send(rest, number)
        wait_until(lambda: not any(map(is_alive, rest)), patience)  # noqa: B023  (used at once)
        rest = [process for process in rest if is_alive(process)]
        if not rest:
            break
    reap(everyone)
    return rest


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to those that live."""
    for process in processes:
        if is_alive(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def reap(processes: Iterable[Process]) -> None:
    """Collect the exit codes of those that are this process's own children."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def of_cluster(folder: Path, cluster_name: str) -> list[Process]:
    """Every live process of the cluster in `folder`: daemons, slurmstepd and the jobs' own.

    A daemon carries the marker; Slurm puts the cluster's name into every job's environment.
    A user's shell with SLURM_CONF set is not one of them.
    """
    return _carrying({f"{MARKER}={folder}"}, {f"SLURM_CLUSTER_NAME={cluster_name}"})


def of_node(folder: Path, cluster_name: str, node: str) -> list[Process]:
    """The live processes of one node: its slurmd, its slurmstepds and its jobs' own, in turn."""
    daemons = _carrying({f"{MARKER}={folder}", f"{NODE_MARKER}={node}"})
    jobs = _carrying({f"SLURM_CLUSTER_NAME={cluster_name}", f"SLURMD_NODENAME={node}"})
    return sorted(daemons, key=lambda process: process.name != "slurmd") + jobs


def _carrying(*markers: set[str]) -> list[Process]:
    """Live processes whose environment has every variable of one of the sets."""
    wanted = [{text.encode() for text in group} for group in markers]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        variables = set(_environment(entry))
        if any(group <= variables for group in wanted):
            pid = int(entry.name)
            process = Process(_name(entry), pid, _stat(pid)[1])
            if is_alive(process):
                found.append(process)
    return found


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or of another user
        return []


def _name(entry: Path) -> str:
    try:
        return (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"
