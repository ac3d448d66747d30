"""Faults on purpose: end, freeze and bring back single daemons of a running cluster.

A daemon is named as `status` prints it: slurmctld, slurmdbd, mariadbd, munged, slurmd-n2.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from private_slurm import processes
from private_slurm.cluster import Cluster, load, save
from private_slurm.daemons import await_up, daemons, launch
from private_slurm.errors import USAGE, ClusterError
from private_slurm.processes import Process

_NODE = "slurmd-"


def kill(folder: Path, name: str) -> None:
    """SIGKILL one daemon. A slurmd's jobs run on without it.

    Raises:
        ClusterError: there is no such daemon, it is dead already, or it survives.
    """
    _, process = _living(folder, name)
    processes.send([process], signal.SIGKILL)
    _await_end([process])


def stop(folder: Path, name: str) -> None:
    """End one daemon as an administrator would: SIGTERM, after 10 s SIGKILL.

    Raises:
        ClusterError: there is no such daemon, it is dead already, or it survives.
    """
    _, process = _living(folder, name)
    processes.end([process])
    _await_end([process])


def pause(folder: Path, name: str) -> None:
    """Freeze one daemon: its port takes connections and nothing answers.

    Raises:
        ClusterError: there is no such daemon, or it is dead.
    """
    processes.send([_living(folder, name)[1]], signal.SIGSTOP)


def resume(folder: Path, name: str) -> None:
    """Let a frozen daemon go on.

    Raises:
        ClusterError: there is no such daemon, or it is dead.
    """
    processes.send([_living(folder, name)[1]], signal.SIGCONT)


def lose(folder: Path, name: str) -> None:
    """SIGKILL a slurmd and all that runs on its node, as a power cut does.

    Raises:
        ClusterError: `name` is no living slurmd, or a process survives.
    """
    cluster, slurmd = _living(folder, name)
    if not name.startswith(_NODE):
        raise ClusterError(f"lose {name}: expected a node's daemon, slurmd-n1", exit_code=USAGE)
    plan = cluster.plan
    # slurmd and slurmstepd before the jobs: they would tell the controller of the jobs' ends.
    others = processes.of_node(plan.folder, plan.name, name.removeprefix(_NODE))
    everyone = [slurmd, *(process for process in others if process.pid != slurmd.pid)]
    processes.send(everyone, signal.SIGKILL)
    _await_end(everyone)


def start(folder: Path, name: str) -> None:
    """Start a dead daemon again with the cluster's files, and wait until it answers.

    Raises:
        ClusterError: there is no such daemon, it lives, or it does not come up.
    """
    cluster, old = _find(folder, name)
    if processes.is_alive(old):
        raise ClusterError(f"{name} runs already (pid {old.pid})", exit_code=USAGE)
    (daemon,) = (daemon for daemon in daemons(cluster.plan) if daemon.name == name)
    new = launch(cluster.plan, daemon)
    save(replace(cluster, processes=[new if p.name == name else p for p in cluster.processes]))
    await_up(cluster.plan, daemon, new)


ACTIONS: Mapping[str, Callable[[Path, str], None]] = {
    "kill": kill,
    "stop": stop,
    "pause": pause,
    "resume": resume,
    "lose": lose,
    "start": start,
}


def _find(folder: Path, name: str) -> tuple[Cluster, Process]:
    cluster = load(folder)
    for process in cluster.processes:
        if process.name == name:
            return cluster, process
    names = ", ".join(process.name for process in cluster.processes)
    raise ClusterError(f"no daemon {name!r} in {folder}; there are {names}", exit_code=USAGE)


def _living(folder: Path, name: str) -> tuple[Cluster, Process]:
    cluster, process = _find(folder, name)
    if not processes.is_alive(process):
        raise ClusterError(f"{name} is dead already", exit_code=USAGE)
    return cluster, process


def _await_end(ended: list[Process]) -> None:
    if not processes.wait_until(lambda: not any(map(processes.is_alive, ended)), 5.0):
        rest = [f"{p.name} (pid {p.pid})" for p in ended if processes.is_alive(p)]
        raise ClusterError(f"still alive after SIGKILL: {', '.join(rest)}")
    processes.reap(ended)
