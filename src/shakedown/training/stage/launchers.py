"""Launchers of a command's ranks, here or over a Slurm job."""

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shakedown.cluster.ranks import loopback_of, rank_components
from shakedown.cluster.supervise import Component
from shakedown.cluster.task_start import NODE_RANK
from shakedown.core.folders import storage_errors
from shakedown.core.paths import AttemptPaths
from shakedown.core.private import write_secret
from shakedown.progress.patience import Patience
from shakedown.slurm.client import srun_argv
from shakedown.training.stage import ray_driver

LAUNCH = "trainer-launch"
RAY = "ray"  # needed until the command has ended: see `endings`


@dataclass(frozen=True)
class TrainerLaunch:
    """The launch of a command stage.

    `words`: the command. `head`: the first node's address, `port` one that is free there.
    `python`: of the trainer's environment. `start_timeout`: seconds that Ray's nodes may take.
    `dashboard`: the port of Ray's page on the first node's loopback.
    """

    words: Sequence[str]
    nodes: Sequence[str]
    ranks_per_node: int
    head: str
    port: int
    python: str
    attempt: AttemptPaths
    env: Mapping[str, str]
    srun_args: Sequence[str] = ()
    start_timeout: float = Patience.phase
    dashboard: int = 8265

    @property
    def log_dir(self) -> str:
        """The folder in which a launcher writes one folder of logs per rank."""
        return str(self.attempt.logs.absolute())


def launch_components(kind: str, launch: TrainerLaunch) -> list[Component]:
    """The components of a command that `kind` launches.

    Raises:
        UsageError: as `rank_components`.
    """
    if kind == "srun":
        return _rank_tasks(launch)
    if kind == "ray":
        return _ray(launch)
    argv = _COMMANDS[kind](launch)
    # `none` is one process, whatever it starts on the other nodes itself.
    if kind == "none" or not _by_slurm(launch):
        argv = [word.replace(NODE_RANK, "0") for word in argv]
        # One thread per rank, as torchrun's own default, which it logs.
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if kind != "none" else {}
        env |= {**loopback_of(launch.nodes), **launch.env}
        return [
            Component(LAUNCH, "trainer", tuple(argv), launch.attempt.log(LAUNCH), env, foreign=True)
        ]
    return [_node_tasks(launch, argv)]


def _by_slurm(launch: TrainerLaunch) -> bool:
    return len(launch.nodes) > 1 or bool(launch.srun_args and "SLURM_JOB_ID" in os.environ)


def _none(launch: TrainerLaunch) -> list[str]:
    return list(launch.words)


def _torchrun(launch: TrainerLaunch) -> list[str]:
    return [
        launch.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(launch.nodes)}",
        f"--nproc-per-node={launch.ranks_per_node}",
        f"--node-rank={NODE_RANK}",
        f"--master-addr={launch.head}",
        f"--master-port={launch.port}",
        f"--log-dir={_node_logs(launch)}",
        "--redirects=3",
        *launch.words,
    ]


def _accelerate(launch: TrainerLaunch) -> list[str]:
    return [
        launch.python,
        "-m",
        "accelerate.commands.launch",
        f"--num_machines={len(launch.nodes)}",
        f"--num_processes={len(launch.nodes) * launch.ranks_per_node}",
        f"--machine_rank={NODE_RANK}",
        f"--main_process_ip={launch.head}",
        f"--main_process_port={launch.port}",
        f"--log_dir={_node_logs(launch)}",
        "--tee=3",
        *launch.words,
    ]


def _node_logs(launch: TrainerLaunch) -> Path:
    """One folder per node: torchrun counts within one (report/stage_logs.py has the ranks)."""
    return launch.attempt.logs.absolute() / f"torchrun-{NODE_RANK}"


_COMMANDS: Mapping[str, Callable[[TrainerLaunch], list[str]]] = {
    "none": _none,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
}


def _node_tasks(launch: TrainerLaunch, argv: Sequence[str], role: str = "trainer") -> Component:
    """One task per node."""
    step = srun_argv(
        nodes=launch.nodes,
        tasks=len(launch.nodes),
        job_name=role,
        # No number at the end, which would be read as a rank.
        output=launch.attempt.logs / f"{role}-launch-%N-output.log",
        more=launch.srun_args,
    )
    task = [sys.executable, "-P", "-m", "shakedown.cluster.task_start", "--node", "--", *argv]
    name, env = f"{role}-srun", dict(launch.env)
    return Component(name, role, (*step, *task), launch.attempt.log(name), env, foreign=True)


def _ray(launch: TrainerLaunch) -> list[Component]:
    """A head here, a worker on each other node, and the command here once all have joined."""
    address = f"{launch.head}:{launch.port}"
    start = [
        launch.python,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
    ]
    env = {**loopback_of(launch.nodes), **_closed_ray(launch), **launch.env}
    head = [*start, "--head", f"--node-ip-address={launch.head}", f"--port={launch.port}"]
    head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={launch.dashboard}"]
    wait = [str(len(launch.nodes)), str(launch.start_timeout)]
    driver = [launch.python, str(Path(ray_driver.__file__)), *wait, "--", *launch.words]
    found = [
        Component(RAY, RAY, tuple(head), launch.attempt.log("ray-head"), env, foreign=True),
        Component(
            LAUNCH,
            "trainer",
            tuple(driver),
            launch.attempt.log(LAUNCH),
            {**env, "RAY_ADDRESS": address},
            foreign=True,
        ),
    ]
    others = launch.nodes[1:]
    if others:
        join = replace(launch, nodes=others)
        found.insert(1, _node_tasks(join, [*start, f"--address={address}"], RAY))
    return found


def _closed_ray(launch: TrainerLaunch) -> dict[str, str]:
    """Variables that keep other users out: a token, a private session folder, loopback if alone.

    Anyone who reaches a cluster without a token can run anything as its owner.
    """
    token = launch.attempt.secret.absolute()
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    with storage_errors("write", token):
        write_secret(token, secrets.token_hex(32).encode("ascii"))
    with storage_errors("write", Path(parent)):
        # Others could have made a folder whose name they can guess. A short one: Ray's sockets
        # are in it, and a path of more than 107 characters is too long for a socket.
        folder = tempfile.mkdtemp(prefix="sd-ray-", dir=parent)
    closed = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    # Ray's own switch for "no more than this machine"; else it takes the host's address for
    # 127.0.0.1 and listens on all.
    return closed | ({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if len(launch.nodes) == 1 else {})


def _rank_tasks(launch: TrainerLaunch) -> list[Component]:
    """One task per rank, as for our own ranks; without beats, these are found by the mark."""
    found = rank_components(
        argv=launch.words,
        world_size=len(launch.nodes) * launch.ranks_per_node,
        nodes=launch.nodes,
        log_dir=launch.attempt.logs,
        env=launch.env,
        master_port=launch.port,
        srun_args=launch.srun_args,
    )
    return [replace(component, foreign=True) for component in found]
