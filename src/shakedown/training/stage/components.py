"""The processes of a stage: trainer ranks, and for GRPO the inference server and orchestrator."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shakedown.cluster.nodes import non_ephemeral_port
from shakedown.cluster.ranks import rank_components
from shakedown.cluster.supervise import Component
from shakedown.config import ProfileConfig, ServeConfig
from shakedown.core.paths import AttemptPaths
from shakedown.inference.auth import make_secret
from shakedown.inference.engines import get_engine
from shakedown.monitor import hook
from shakedown.slurm.client import srun_argv
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.nodes import node_address
from shakedown.training.serving import launch_spec
from shakedown.training.stage import profiling
from shakedown.training.stage.devices import StageDevices
from shakedown.training.stage.job import StageJob

# Debug levels that a rerun may switch on, cheapest first; docs/hang.md has their cost. DETAIL
# makes c10d compare every collective over the ranks before it runs; with CUDA_LAUNCH_BLOCKING a
# stack shows the kernel that hangs, not the next call that waits for it.
DEBUG_ENVIRONMENT: dict[str, dict[str, str]] = {
    "off": {},
    "info": {"NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"},
    "detail": {
        "NCCL_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    },
    "blocking": {
        "NCCL_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "CUDA_LAUNCH_BLOCKING": "1",
    },
}


@dataclass(frozen=True)
class ServerPlan:
    """The stage's own inference servers, one per node: where they listen and how they start.

    `base_url`: with commas between several. `replicas`: data-parallel ones of each.
    """

    components: Sequence[Component]
    base_url: str
    served_name: str
    replicas: int


def trainer_components(
    job: StageJob,
    job_file: Path,
    nodes: Sequence[str],
    srun_args: Sequence[str] = (),
    gpus: Mapping[str, str] | None = None,
    *,
    profile: ProfileConfig | None = None,
) -> list[Component]:
    """One component per rank here, or one srun step over the nodes of a Slurm job.

    `gpus`: the variables of `cluster.gpus.wanted_gpus`.
    """
    worker = [sys.executable, "-m", "shakedown.training.stage.worker", "--job", str(job_file)]
    order = profiling.trainer_order(job, profile)
    return rank_components(
        argv=[*profiling.prefix(order), *worker],
        world_size=job.world_size,
        nodes=nodes,
        log_dir=job.attempt.logs,
        env={
            **trainer_environment(job.config.debug),
            **_growing_segments(),
            **(gpus or {}),
            **profiling.environment(order),
        },
        master_port=non_ephemeral_port(),
        srun_args=srun_args,
        # The trainer is on other nodes where the server fills this one (docs/allocation.md).
        elsewhere=nodes[0] != node_name(),
    )


def trainer_environment(debug: str) -> Mapping[str, str]:
    """Flight Recorder and debug variables, which torch reads when it is loaded."""
    return {**hook.ENVIRONMENT, **DEBUG_ENVIRONMENT[debug]}


def _growing_segments() -> Mapping[str, str]:
    """torch's allocator on GPUs, unless the user has set it up.

    Micro batches differ in length: segments of fixed sizes leave gaps between them, ones that grow
    do not (torch's notes on CUDA, `expandable_segments`). For these ranks alone: vLLM's sleep mode
    and tensors that are handed to other processes do not work with them.
    """
    if any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def server_plan(
    serve: ServeConfig,
    model: str,
    dtype: str,
    attempt: AttemptPaths,
    seed: int,
    *,
    devices: StageDevices,
    srun_args: Sequence[str] = (),
    profile: ProfileConfig | None = None,
) -> ServerPlan:
    """The inference servers that the stage owns and whose weights it updates."""
    engine = get_engine(serve.engine)
    spec = launch_spec(serve, model=model, dtype=dtype, seed=seed)
    # Whoever reaches a port can load other weights.
    make_secret(attempt.secret)
    spec = replace(spec, secret=str(attempt.secret.absolute()))
    # The orchestrator runs on this node, too.
    here = replace(spec, host="127.0.0.1", port=non_ephemeral_port())
    order = profiling.server_order(serve.engine, attempt, profile)
    command = engine.launch(here)
    component = Component(
        name="inference",
        role="inference",
        argv=(*profiling.prefix(order), *command.argv),
        log=attempt.log("inference"),
        env={**command.env, **devices.server, **profiling.environment(order)},
        own_temporary=True,
    )
    components, urls = [component], [f"http://{here.host}:{here.port}"]
    for number, node in enumerate(devices.server_nodes[1:], 1):
        there = replace(spec, host=node_address(node), port=non_ephemeral_port())
        urls.append(f"http://{there.host}:{there.port}")
        command, name = engine.launch(there), f"inference-{number}"
        components.append(
            Component(
                name=name,
                role="inference",
                argv=(
                    *srun_argv(nodes=[node], tasks=1, job_name=name, more=srun_args),
                    *(sys.executable, "-P", "-m", "shakedown.cluster.task_start"),
                    *("--node", "--temporary", "--", *command.argv),
                ),
                log=attempt.log(name),
                env={**command.env, **devices.elsewhere},
            )
        )
    return ServerPlan(components, ",".join(urls), spec.served_name, spec.size(serve.engine, "d"))


def orchestrator_component(job: StageJob, job_file: Path) -> Component:
    """Generates rollouts for the trainer and loads its weights into the server."""
    return Component(
        name="orchestrator",
        role="orchestrator",
        argv=(
            sys.executable,
            "-m",
            "shakedown.training.stage.orchestrator",
            "--job",
            str(job_file),
        ),
        log=job.attempt.log("orchestrator"),
        # It shares the cores with ranks and server; two torch threads on two busy cores were ten
        # times slower than one (measured).
        env={"OMP_NUM_THREADS": "1"},
    )
