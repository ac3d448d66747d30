"""The components of a distributed program: one process per rank, here or over a Slurm job."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shakedown.cluster.gpus import visible_gpus
from shakedown.cluster.supervise import Component
from shakedown.core.errors import UsageError
from shakedown.slurm.client import srun_argv
from shakedown.slurm.nodes import node_address


def rank_components(
    *,
    argv: Sequence[str],
    world_size: int,
    nodes: Sequence[str],
    log_dir: Path,
    env: Mapping[str, str],
    role: str = "trainer",
    master_port: int,
    srun_args: Sequence[str] = (),
    elsewhere: bool = False,
) -> list[Component]:
    """Components that run `argv` once per rank.

    On one node: one component per rank, `{role}-rank{N}`. On several nodes of a Slurm job, or with
    `srun_args` or `elsewhere` on one: `{role}-srun`, whose tasks write the same
    `{role}-rank{N}.log` files. MASTER_ADDR, where rank 0 listens, is loopback on one node and
    otherwise an address of `nodes[0]` that all of them reach.

    Args:
        world_size: total number of ranks; they fill the nodes in order, equally many per node.
        env: added to this process's environment; SHAKEDOWN_GPUS in it names the node's GPUs that
        are theirs. srun_args: more options of srun, such as those of its container plugin.
        elsewhere: the only node of `nodes` is not this one.

    Raises:
        UsageError: fewer ranks than nodes, or ranks that do not spread equally.
    """
    if world_size < 1 or not nodes or world_size % len(nodes):
        raise UsageError(
            f"{world_size} rank(s) do not spread equally over {len(nodes)} node(s)",
            hint="make the allocation's world size a multiple of cluster.nodes",
        )
    shared = {
        "MASTER_ADDR": node_address(nodes[0]) if len(nodes) > 1 else "127.0.0.1",
        "MASTER_PORT": str(master_port),
        # As torchrun does. Two threads per rank on two busy cores were ten times slower (torch
        # 2.13).
        "OMP_NUM_THREADS": "1",
        **loopback_of(nodes),
        **env,
    }
    if len(nodes) > 1 or elsewhere or (srun_args and "SLURM_JOB_ID" in os.environ):
        return [
            _srun(
                argv=argv,
                world_size=world_size,
                nodes=nodes,
                log_dir=log_dir,
                env=shared,
                role=role,
                srun_args=srun_args,
            )
        ]
    shared |= visible_gpus(shared, os.environ)
    return _local(argv=argv, world_size=world_size, log_dir=log_dir, env=shared, role=role)


def _local(
    *, argv: Sequence[str], world_size: int, log_dir: Path, env: Mapping[str, str], role: str
) -> list[Component]:
    return [
        Component(
            name=f"{role}-rank{rank}",
            role=role,
            argv=tuple(argv),
            log=log_dir / f"{role}-rank{rank}.log",
            env={**env, **_local_rank(rank, world_size)},
            rank=rank,
        )
        for rank in range(world_size)
    ]


def _local_rank(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def loopback_of(nodes: Sequence[str]) -> dict[str, str]:
    """Keep gloo's connections on loopback if all ranks are on one node.

    Then no other machine can reach them, and it does not matter what the host's name resolves to.
    """
    if len(nodes) > 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}


def _srun(
    *,
    argv: Sequence[str],
    world_size: int,
    nodes: Sequence[str],
    log_dir: Path,
    env: Mapping[str, str],
    role: str,
    srun_args: Sequence[str],
) -> Component:
    step = srun_argv(
        nodes=nodes,
        tasks=world_size,
        output=log_dir / f"{role}-rank%t.log",
        job_name=role,
        more=srun_args,
    )
    # -P: a `queue.py` in the working directory must not shadow the standard library's.
    rank = [sys.executable, "-P", "-m", "shakedown.cluster.task_start", "--", *argv]
    return Component(
        name=f"{role}-srun",
        role=role,
        argv=(*step, *rank),
        log=log_dir / f"{role}-srun.log",
        env=env,
    )
