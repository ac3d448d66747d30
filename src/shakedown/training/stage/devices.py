"""Nodes and GPUs of a stage's trainer and its own server, by cluster/placement.py."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shakedown.cluster.gpus import visible_gpus, wanted_gpus
from shakedown.config import ServeConfig, StageConfig
from shakedown.config.capacity import stage_placement
from shakedown.core.errors import UsageError


@dataclass(frozen=True)
class StageDevices:
    """`trainer_nodes`: names, in the order of the ranks; `server_nodes`: those of the stage's own
    servers, this one first; `trainer`, `server`, `elsewhere`: variables, the last of servers on
    other nodes.
    """

    trainer_nodes: Sequence[str]
    trainer: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)
    server_nodes: Sequence[str] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def stage_devices(
    stage: StageConfig,
    serve: ServeConfig,
    nodes: Sequence[str],
    gpus_per_node: int,
    environ: Mapping[str, str] = os.environ,
) -> StageDevices:
    """The nodes of a stage's trainer, and the GPUs that each component sees there.

    GPUs are only assigned where there is a server too: a trainer alone begins at GPU 0.

    Args:
        nodes: names of the stage's nodes; the first one is this one.

    Raises:
        UsageError: it does not fit, or the job shows fewer GPUs than the config says.
    """
    serving = nodes[: serve.nodes]
    if not gpus_per_node:
        return StageDevices(nodes, server_nodes=serving)
    trainer, *servers = stage_placement(stage, serve, gpus_per_node).parts
    names = [nodes[number] for number in trainer.nodes]
    if not servers:
        return StageDevices(names)
    # Each server has the numbers on its node that the first has here, and so has each trainer rank.
    both = set(servers[0].gpus(0)) & set(trainer.gpus(trainer.nodes[0]))
    if both and not serve.share_gpus and set(names) & set(serving):
        raise UsageError(
            f"serve.nodes {serve.nodes}: server and trainer would both have GPU "
            f"{', '.join(map(str, sorted(both)))} of {' and '.join(sorted({*names} & {*serving}))}",
            hint="leave the trainer GPUs of its own on these nodes, or set serve.share_gpus",
        )
    return StageDevices(
        trainer_nodes=names,
        trainer=wanted_gpus(trainer.gpus(trainer.nodes[0])),  # the same on each of its nodes
        server=visible_gpus(wanted_gpus(servers[0].gpus(0)), environ),
        server_nodes=serving,
        elsewhere=wanted_gpus(servers[0].gpus(0)),
    )
