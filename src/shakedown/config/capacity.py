"""Capacity: whether everything that runs at once fits into the config's cluster."""

from shakedown.cluster.allocation import AllocationPart, parse_allocation
from shakedown.cluster.placement import Placement, PlacementError, place_stage
from shakedown.config.command import CommandStage
from shakedown.config.runtime_stage import StageConfig
from shakedown.config.schema import Config, ServeConfig
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding, advice, fault

# Options that bound an engine's share of a GPU's memory; without one, it takes almost all.
MEMORY_OPTIONS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def server_part(serve: ServeConfig) -> AllocationPart:
    """The server's part of `serve.allocation`; `transformers` is one process.

    Raises:
        UsageError: not an allocation, or none of the engine.
    """
    if not serve.cut:
        return AllocationPart(serve.engine, None, {"d": 1}, 1)
    for part in parse_allocation(serve.allocation).parts:
        if part.backend == serve.engine:
            return part
    raise UsageError(f"serve.allocation {serve.allocation!r} is not for {serve.engine}")


def stage_placement(stage: StageConfig, serve: ServeConfig, gpus_per_node: int) -> Placement:
    """The trainer of a stage, and for GRPO its own server, on the stage's nodes.

    Raises:
        UsageError: an allocation is not valid.
        PlacementError: they do not fit.
    """
    return place_stage(
        parse_allocation(stage.allocation).parts[0],
        server_part(serve) if stage.grpo else None,
        nodes=stage.nodes,
        gpus_per_node=gpus_per_node,
        share=serve.share_gpus,
    )


def ranks_per_node(
    stage: StageConfig | CommandStage, serve: ServeConfig, gpus_per_node: int
) -> int:
    """Most trainer ranks on one node.

    Raises:
        UsageError: as `stage_placement`.
    """
    if isinstance(stage, CommandStage):
        return stage.ranks_per_node
    if not gpus_per_node:
        return max(1, parse_allocation(stage.allocation).parts[0].world // stage.nodes)
    trainer = stage_placement(stage, serve, gpus_per_node).parts[0]
    return max(sum(place.node == node for place in trainer.ranks) for node in trainer.nodes)


def lint_capacity(config: Config) -> list[Finding]:
    """Findings about nodes and GPUs; allocations that do not parse are judged elsewhere."""
    findings = []
    if config.cluster.gpus_per_node:
        findings += [*_lint_server(config), *_lint_memory(config)]
    for name, stage in config.stages.items():
        key = f"stages.{name}"
        if stage.nodes > config.cluster.nodes:
            expected = f"at most cluster.nodes: {config.cluster.nodes}"
            findings.append(fault("nodes", f"{key}.nodes", stage.nodes, expected))
        elif isinstance(stage, CommandStage):
            findings += _lint_command(config, key, stage)
        else:
            findings += _lint_stage(config, key, stage)
    return findings


def _lint_command(config: Config, key: str, stage: CommandStage) -> list[Finding]:
    gpus = config.cluster.gpus_per_node
    if not gpus or stage.ranks_per_node <= gpus:
        return []
    expected = f"at most the {gpus} GPUs of a node (cluster.gpus_per_node)"
    subject, remedy = f"{key}.ranks_per_node", "several ranks share a GPU"
    return [advice("gpus", subject, stage.ranks_per_node, expected, remedy=remedy)]


def _lint_server(config: Config) -> list[Finding]:
    """Findings about the persistent server, which has one node, and stays there if kept."""
    gpus = config.cluster.gpus_per_node
    try:
        part = server_part(config.serve)
    except UsageError:
        return []
    if part.world > gpus:
        expected = f"at most the {gpus} GPUs of one node (cluster.gpus_per_node)"
        measured = config.serve.allocation
        return [fault("gpus", "serve.allocation", measured, expected, remedy=_smaller(part))]
    if config.serve.keep and config.cluster.launcher == "local":
        expected = "false, or cluster.launcher: slurm"
        remedy = "here a server that is kept holds its GPUs while the stages run"
        return [advice("gpus", "serve.keep", True, expected, remedy=remedy)]
    return []


def _lint_stage(config: Config, key: str, stage: StageConfig) -> list[Finding]:
    try:
        trainer = parse_allocation(stage.allocation).parts[0]
        server = server_part(config.serve)
    except UsageError:
        return []
    gpus = config.cluster.gpus_per_node
    if not gpus:
        expected = f"a divisor of {trainer.world} ranks"
        found = [fault("nodes", f"{key}.nodes", stage.nodes, expected)]
        return found if trainer.world % stage.nodes else []
    if stage.grpo and server.world > gpus:
        return []  # already reported for serve.allocation
    try:
        placement = stage_placement(stage, config.serve, gpus)
    except PlacementError as error:
        return [_does_not_fit(config, key, stage, trainer, error)]
    measured = stage.allocation
    return [
        advice("gpus", f"{key}.allocation", measured, "groups inside a node", remedy=w)
        for w in placement.warnings
    ]


def _does_not_fit(
    config: Config, key: str, stage: StageConfig, trainer: AllocationPart, error: PlacementError
) -> Finding:
    gpus = config.cluster.gpus_per_node
    expected = f"{stage.nodes} x {gpus} GPUs at most ({key}.nodes, cluster.gpus_per_node)"
    # Tried without the server, to say which of the two keys has to change.
    try:
        place_stage(trainer, None, nodes=stage.nodes, gpus_per_node=gpus)
    except PlacementError as alone:
        return fault("gpus", f"{key}.allocation", stage.allocation, expected, remedy=str(alone))
    measured = f"{stage.allocation} beside the stage's server, {config.serve.allocation}"
    remedy = (
        f"{error}; take fewer ranks, a smaller serve.allocation or more nodes, "
        "or set serve.share_gpus: true"
    )
    return fault("gpus", f"{key}.allocation", measured, expected, remedy=remedy)


def _lint_memory(config: Config) -> list[Finding]:
    """Findings about memory: on a shared GPU the engine must leave some to the trainer."""
    serve = config.serve
    option = MEMORY_OPTIONS.get(serve.engine)
    shared = serve.share_gpus and any(stage.grpo for stage in config.own_stages.values())
    # Both `--option=0.4` and `--option`, `0.4`.
    given = any(word.split("=")[0] == option for word in serve.extra_args)
    if not shared or given or option is None:
        return []
    remedy = f"{serve.engine} takes almost all of a GPU's memory by itself"
    expected = f"{option} beside serve.share_gpus"
    measured = list(serve.extra_args)
    return [advice("gpus", "serve.extra_args", measured, expected, remedy=remedy)]


def _smaller(part: AllocationPart) -> str:
    sizes = ", ".join(letter for letter, size in part.dims.items() if size > 1)
    return f"take a smaller {sizes}: a server runs on one node"
