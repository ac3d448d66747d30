"""The plan of an attempt at a stage, made of the config."""

import os
from dataclasses import replace
from pathlib import Path

from shakedown.config import Config
from shakedown.config.command import fill, placeholders_in
from shakedown.config.lint import trainer_world
from shakedown.core.errors import ConfigError, UsageError
from shakedown.core.outcome import read_outcome
from shakedown.core.paths import RunPaths, StagePaths
from shakedown.core.private import make_private_tree
from shakedown.debug import debug_settings
from shakedown.inference.folder import read_endpoint
from shakedown.profiling.launch import requested
from shakedown.training.assets import Assets, read_assets
from shakedown.training.drift import drift_limits
from shakedown.training.forecast.stage import with_micro_batches
from shakedown.training.lint_rules.model_sizes import known_decoder
from shakedown.training.stage.builtin_stage import StagePlan
from shakedown.training.stage.command import CommandJob, CommandPlan
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.launched import AttemptPlan
from shakedown.training.stage.progress import expand

SERVER = "policy"  # the run's persistent server, as the workflow calls it


def plan_any(
    config: Config,
    stage: str,
    paths: RunPaths,
    assets: Path,
    *,
    model: Path | None = None,
    replay: Path | None = None,
) -> AttemptPlan:
    """The plan of a stage of any kind; `assets`: the file, which is read where it is needed.

    Raises:
        UsageError, ConfigError, UntrustedError: as `plan_stage` and `plan_command`.
    """
    if stage in config.own_stages:
        given = read_assets(assets)
        return plan_stage(config, stage, paths, given, model=model, replay=replay)
    if replay:
        raise UsageError(f"--replay: stage {stage} is a command: only grpo has rollouts")
    return plan_command(config, stage, paths, assets, model=model)


def plan_command(
    config: Config, stage: str, paths: RunPaths, assets: Path, *, model: Path | None = None
) -> CommandPlan:
    """The plan of a stage that is a command.

    Raises:
        UsageError: the assets or the server's endpoint that it asks for cannot be read.
        ConfigError: the stage before this one has not completed, or left no model.
        UntrustedError: others can change that model or the endpoint.
    """
    settings = config.command_stages[stage]
    known = {
        "nodes": str(settings.nodes),
        "ranks_per_node": str(settings.ranks_per_node),
        "ranks": str(settings.world_size),
        "run": str(paths.root.absolute()),
        "stage": str(paths.stage(stage).root.absolute()),
    }
    asked = settings.placeholders
    if asked & {"model", "data", "heldout"}:
        given = read_assets(assets)
        known |= {"data": given.train, "heldout": given.heldout}
        if "model" in asked:
            own = _own_model(model) if model else None
            known["model"] = own or _input_model(config, stage, paths, given.model)
    if asked & {"server_url", "server_key_file"}:
        endpoint = read_endpoint(paths.server(SERVER).endpoint)
        known |= {"server_url": endpoint.base_url, "server_key_file": endpoint.secret}
    job = CommandJob(
        stage=stage,
        config=settings,
        stage_root=str(paths.stage(stage).root.absolute()),
        world_size=settings.world_size,
        values=known,
    )
    return CommandPlan(job, config.cluster.srun_args)


def plan_stage(
    config: Config,
    stage: str,
    paths: RunPaths,
    assets: Assets,
    *,
    model: Path | None = None,
    replay: Path | None = None,
) -> StagePlan:
    """The plan of one stage of our own.

    Args:
        model: the input model; None takes that of the stage before, else the run's.
        replay: a folder of recorded rollouts to train on instead of generating.

    Raises:
        UsageError: `model` is not a model folder; NeMo RL's variables for profiles are wrong;
            the allocation is not valid.
        ConfigError: the stage before this one has not completed.
        UntrustedError: others can change the model of that stage.
    """
    folder = _own_model(model) if model else _input_model(config, stage, paths, assets.model)
    settings = with_micro_batches(config, stage, known_decoder(folder))
    job = StageJob(
        stage=stage,
        config=settings,
        model=folder,
        dtype=config.model.dtype,
        train=assets.train,
        heldout=assets.heldout,
        reward=config.data.reward,
        reward_timeout=config.data.reward_timeout,
        reward_memory_gb=config.data.reward_memory_gb,
        reward_failed_share=config.data.reward_failed_share,
        seed=config.seed,
        world_size=trainer_world(settings),
        stage_root=str(paths.stage(stage).root.absolute()),
        replay=str(replay.absolute()) if replay else "",
        drift_limits=drift_limits(config, stage),
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    if debug_settings.is_asked():
        job = without_timeouts(job)
    return StagePlan(
        job,
        config.serve,
        config.cluster.srun_args,
        config.cluster.gpus_per_node,
        requested(os.environ, settings.profile),
    )


def without_timeouts(job: StageJob) -> StageJob:
    """The job when its parts may stand in a debugger for as long as a person needs."""
    config = job.config
    if config.grpo is not None:
        names = ("agent_timeout", "batch_timeout", "weight_update_timeout")
        grpo = config.grpo.model_copy(update=dict.fromkeys(names, debug_settings.NO_TIMEOUT))
        config = config.model_copy(update={"grpo": grpo})
    return replace(job, config=config, reward_timeout=debug_settings.NO_TIMEOUT)


def _own_model(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"--model {folder} is not a Hugging Face model folder: config.json is missing"
        )
    return str(folder.absolute())


def _input_model(config: Config, stage: str, paths: RunPaths, first: str) -> str:
    """The model of the stage before this one, else the run's own, `first`."""
    names = list(config.stages)
    position = names.index(stage)
    if position == 0:
        return first
    before = paths.stage(names[position - 1])
    exported = _model_left_by(config, before)
    make_private_tree(exported)
    # Under the workflow the gate has accepted it; by hand its own outcome has to do.
    done = before.accepted.exists() or (
        before.outcome.exists() and read_outcome(before.outcome).state == "completed"
    )
    if not done or not (exported / "config.json").is_file():
        raise ConfigError(
            f"stage {stage!r} starts from the model of {before.root.name!r}, which is not there",
            hint=f"shakedown train {before.root.name} --config CONFIG; a command leaves a Hugging "
            f"Face folder in {{stage}}/model or names it in `outputs`"
            if before.root.name in config.command_stages
            else f"shakedown train {before.root.name} --config CONFIG",
        )
    return str(exported)


def _model_left_by(config: Config, before: StagePaths) -> Path:
    """A stage's model; a command's is in its folder, or its first output that is a model."""
    settings = config.command_stages.get(before.root.name)
    if settings is None or (before.export / "config.json").is_file():
        return before.export
    values = {"run": str(before.root.parent.parent), "stage": str(before.root)}
    known = [each for each in settings.outputs if set(placeholders_in(each)) <= values.keys()]
    found = (path for each in known for path in expand(fill(each, values)))
    models = [path for path in found if (path / "config.json").is_file()]
    return models[-1].absolute() if models else before.export
