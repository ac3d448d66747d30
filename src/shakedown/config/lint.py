"""Settings that cannot work, beyond types: found before anything is started."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from shakedown.cluster.allocation import AllocationPart, parse_allocation
from shakedown.config.capacity import lint_capacity
from shakedown.config.policy import GrpoConfig
from shakedown.config.runtime_stage import StageConfig
from shakedown.config.schema import Config, ServeConfig
from shakedown.core.errors import UsageError, did_you_mean
from shakedown.core.verdict import Finding, fault
from shakedown.data_sources import FORMATS, parse_source


def lint(
    config: Config,
    *,
    rewards: Collection[str],
    faults: Collection[str],
    engines: Mapping[str, Collection[str]],
) -> list[Finding]:
    """Judge a config against the names that exist; the result is empty when all is well.

    Args:
        engines: the dimensions of an allocation that each training engine has.
    """
    findings = [*_lint_data(config, rewards), *_lint_serve(config)]
    if config.own_stages:
        agent = _lint_agent("agents.target", config.agents.target)
        # A run without GRPO trains without agents; the agent checks alone would fail.
        trains = any(stage.algorithm == "grpo" for stage in config.own_stages.values())
        findings += agent if trains else [replace(found, status="warn") for found in agent]
    findings += _lint_servers_users(config)
    for name, stage in config.own_stages.items():
        findings += _lint_stage(f"stages.{name}", stage, config.serve, faults, engines)
    return [*findings, *lint_capacity(config)]


def trainer_world(stage: StageConfig) -> int:
    """Trainer ranks of a stage.

    Raises:
        UsageError: the allocation string is not valid.
    """
    return int(parse_allocation(stage.allocation).parts[0].world)


def _lint_data(config: Config, rewards: Collection[str]) -> list[Finding]:
    findings = []
    if config.data.reward not in rewards:
        remedy = f"choose one{did_you_mean(config.data.reward, rewards)}"
        expected = "one of " + ", ".join(sorted(rewards))
        findings.append(fault("reward", "data.reward", config.data.reward, expected, remedy))
    form = config.data.format
    if form and form not in FORMATS:
        remedy = f"choose one{did_you_mean(form, FORMATS)}"
        expected = "one of " + ", ".join(FORMATS)
        # No more of the data can be judged: parse_source refuses an unknown format.
        return [*findings, fault("data", "data.format", form, expected, remedy)]
    for key, value in (("train", config.data.train), ("heldout", config.data.heldout)):
        source = parse_source(value, form=form)
        if value != "demo" and not source.hub and not Path(source.place).is_file():
            expected = (
                f"`demo`, an existing JSON-lines or parquet file, hub:NAME[:SPLIT], "
                f"or one of {', '.join(FORMATS)}"
            )
            remedy = did_you_mean(value, FORMATS).strip(" ()")
            findings.append(fault("data", f"data.{key}", value, expected, remedy))
    model = config.model.source
    # A name on the hub has one slash: `owner/name`.
    looks_local = model.startswith((".", "/")) or model.count("/") != 1 or Path(model).is_dir()
    if model != "demo" and looks_local and not (Path(model) / "config.json").is_file():
        expected = "`demo`, a Hugging Face folder with config.json, or a hub name: owner/name"
        findings.append(fault("model", "model.source", model, expected))
    return findings


def _lint_serve(config: Config) -> list[Finding]:
    try:
        backend = parse_allocation(config.serve.allocation).parts[0].backend
    except UsageError as error:
        return [fault("allocation", "serve.allocation", config.serve.allocation, str(error))]
    engine = config.serve.engine
    if config.serve.cut and engine != backend:
        expected = f"an allocation of {engine}"
        return [fault("allocation", "serve.allocation", config.serve.allocation, expected)]
    return []


def _lint_servers_users(config: Config) -> list[Finding]:
    """Commands that need the run's server after it ends, before a stage with its own server."""
    own = False
    for name, stage in config.stages.items():
        if isinstance(stage, StageConfig):
            own |= stage.grpo is not None
        elif own and stage.placeholders & {"server_url", "server_key_file"}:
            expected = "no {server_url} behind a grpo stage, before which the server ends"
            remedy = "name this stage before the grpo stages in `order`"
            return [fault("serve", f"stages.{name}.command", stage.command, expected, remedy)]
    return []


def _lint_stage(
    key: str,
    stage: StageConfig,
    serve: ServeConfig,
    faults: Collection[str],
    engines: Mapping[str, Collection[str]],
) -> list[Finding]:
    try:
        part, *others = parse_allocation(stage.allocation).parts
    except UsageError as error:
        return [fault("allocation", f"{key}.allocation", stage.allocation, str(error))]
    if others:
        remedy = "the server's part belongs in serve.allocation"
        expected = "the one part of the trainer"
        return [fault("allocation", f"{key}.allocation", stage.allocation, expected, remedy)]
    findings = _lint_engine(key, stage, part, engines)
    # Only data parallelism cuts a batch: tensor and pipeline ranks take the same rows.
    findings += _lint_sizes(key, stage, part.size("d"))
    if stage.grpo:
        if stage.grpo.agent:
            findings += _lint_agent(f"{key}.grpo.agent", stage.grpo.agent)
        findings += _lint_server_of(f"{key}.grpo", stage.grpo, serve)
        if serve.nodes > stage.nodes:
            expected = f"at most {key}.nodes, {stage.nodes}: a separate server on each"
            findings.append(fault("serve", "serve.nodes", serve.nodes, expected))
    if stage.fault and stage.fault.kind not in faults:
        remedy = f"choose one{did_you_mean(stage.fault.kind, faults)}"
        expected = "one of " + ", ".join(sorted(faults))
        findings.append(fault("fault", f"{key}.fault.kind", stage.fault.kind, expected, remedy))
    if stage.fault and stage.fault.rank >= part.world:
        expected = f"below {part.world}"
        findings.append(fault("fault", f"{key}.fault.rank", stage.fault.rank, expected))
    return findings


def _lint_engine(
    key: str, stage: StageConfig, part: AllocationPart, engines: Mapping[str, Collection[str]]
) -> list[Finding]:
    """Whether the engine exists, and can cut a model like that."""
    if part.backend not in engines:
        expected = "a training engine: " + ", ".join(sorted(engines))
        return [fault("engine", f"{key}.allocation", part.backend, expected)]
    own = engines[part.backend]
    cut = {letter for letter, size in part.dims.items() if size > 1}
    # No engine here runs the hybrid form, in which the experts are cut in a way of their own.
    if cut <= set(own) and not part.experts:
        return []
    expected = f"{part.backend} with no dimensions but {', '.join(sorted(own))}"
    remedy = f"write {part.backend}:d{part.world}"
    return [fault("engine", f"{key}.allocation", stage.allocation, expected, remedy)]


def _lint_agent(key: str, target: str) -> list[Finding]:
    """Whether the file of an agent class exists."""
    place, colon, name = target.rpartition(":")
    path = Path(place)
    found = not place.endswith(".py") or path.is_file()
    if colon and name.isidentifier() and place and found:
        return []
    expected = "`path/to/file.py:Class` of an existing file, or `package.module:Class`"
    siblings = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    remedy = did_you_mean(path.name, siblings).strip(" ()")
    return [fault("agent", key, target, expected, remedy)]


def _lint_server_of(key: str, grpo: GrpoConfig, serve: ServeConfig) -> list[Finding]:
    """Whether the stage's server can do what the stage needs."""
    findings = []
    if not serve.cut:
        remedy = (
            "a stage updates the weights of a server of its own: an external one is for agents "
            "and compare"
            if serve.engine == "external"
            else "it gives no log-probabilities, and takes no new weights"
        )
        expected = "vllm or sglang, for rollouts"
        findings.append(fault("serve", "serve.engine", serve.engine, expected, remedy))
    if grpo.max_tokens >= serve.max_model_len:
        expected = f"less than serve.max_model_len, {serve.max_model_len}: the prompt needs room"
        findings.append(fault("serve", f"{key}.max_tokens", grpo.max_tokens, expected))
    return findings


def _lint_sizes(key: str, stage: StageConfig, shares: int) -> list[Finding]:
    """Findings about batch sizes; `shares`: the parts that a batch is cut into."""
    findings = []
    if stage.batch_size % shares:
        expected = f"a multiple of {shares} ranks"
        findings.append(fault("batch", f"{key}.batch_size", stage.batch_size, expected))
    grpo = stage.grpo
    if grpo and grpo.max_concurrent < grpo.group_size:
        findings.append(
            fault(
                "staleness",
                f"{key}.grpo.max_concurrent",
                grpo.max_concurrent,
                f"at least one group of {grpo.group_size}",
                "with less, no group can ever start: the trainer waits forever",
            )
        )
    return findings
