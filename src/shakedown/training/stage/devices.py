"""Where a stage's trainer and its own server run: nodes and GPUs, by cluster/placement.py."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shakedown.cluster.gpus import visible_gpus, wanted_gpus
from shakedown.config import ServeConfig, StageConfig
from shakedown.config.places import stage_placement


@dataclass(frozen=True)
class StageDevices:
    """`trainer_nodes`: names, in the order of the ranks; `trainer`, `server`: variables."""

    trainer_nodes: Sequence[str]
    trainer: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)


def stage_devices(
    stage: StageConfig,
    serve: ServeConfig,
    nodes: Sequence[str],
    gpus_per_node: int,
    environ: Mapping[str, str] = os.environ,
) -> StageDevices:
    """Which of its nodes a stage's trainer runs on, and who sees which GPUs there.

    GPUs are only assigned where there is a server too: a trainer alone begins at GPU 0.

    Args:
        nodes: names of the stage's nodes; the first one is this one.

    Raises:
        UsageError: it does not fit, or the job shows fewer GPUs than the config says.
    """
    if not gpus_per_node:
        return StageDevices(nodes)
    trainer, *servers = stage_placement(stage, serve, gpus_per_node).parts
    names = [nodes[number] for number in trainer.nodes]
    if not servers:
        return StageDevices(names)
    return StageDevices(
        trainer_nodes=names,
        trainer=wanted_gpus(trainer.gpus(trainer.nodes[0])),  # the same on each of its nodes
        server=visible_gpus(wanted_gpus(servers[0].gpus(0)), environ),
    )
