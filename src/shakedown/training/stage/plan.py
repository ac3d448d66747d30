"""What the config says of a stage, as the plan of an attempt at it."""

import os
from dataclasses import replace
from pathlib import Path

from shakedown.config import Config
from shakedown.config.lint import trainer_world
from shakedown.core.errors import ConfigError, UsageError
from shakedown.core.outcome import read_outcome
from shakedown.core.paths import RunPaths
from shakedown.core.private import own_tree
from shakedown.debug import asked
from shakedown.profiling.request import requested
from shakedown.training.assets import Assets
from shakedown.training.drift import drift_limits
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.run import StagePlan


def plan_stage(
    config: Config,
    stage: str,
    paths: RunPaths,
    assets: Assets,
    *,
    model: Path | None = None,
    replay: Path | None = None,
) -> StagePlan:
    """The plan of one stage.

    Args:
        model: the input model; None takes that of the stage before, else the run's.
        replay: a folder of recorded rollouts to train on instead of generating.

    Raises:
        UsageError: `model` is no Hugging Face folder; NeMo RL's variables for profiles are wrong.
        ConfigError: the stage before this one has not completed.
        UntrustedError: others can change the model of that stage.
    """
    settings = config.stages[stage]
    job = StageJob(
        stage=stage,
        config=settings,
        model=_own_model(model) if model else _input_model(config, stage, paths, assets.model),
        dtype=config.model.dtype,
        train=assets.train,
        heldout=assets.heldout,
        reward=config.data.reward,
        reward_timeout=config.data.reward_timeout,
        reward_memory_gb=config.data.reward_memory_gb,
        seed=config.seed,
        world_size=trainer_world(settings),
        stage_root=str(paths.stage(stage).root.absolute()),
        replay=str(replay.absolute()) if replay else "",
        drift_limits=drift_limits(config, stage),
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    if asked.is_asked():
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
        grpo = config.grpo.model_copy(update=dict.fromkeys(names, asked.NO_TIMEOUT))
        config = config.model_copy(update={"grpo": grpo})
    return replace(job, config=config, reward_timeout=asked.NO_TIMEOUT)


def _own_model(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {folder} is no Hugging Face folder: it has no config.json")
    return str(folder.absolute())


def _input_model(config: Config, stage: str, paths: RunPaths, first: str) -> str:
    """The model of the stage before this one, else the run's own, `first`."""
    names = list(config.stages)
    position = names.index(stage)
    if position == 0:
        return first
    before = paths.stage(names[position - 1])
    own_tree(before.export)
    # Under the workflow the gate has accepted it; by hand its own outcome has to do.
    done = before.accepted.exists() or (
        before.outcome.exists() and read_outcome(before.outcome).state == "completed"
    )
    if not done or not (before.export / "config.json").is_file():
        raise ConfigError(
            f"stage {stage!r} starts from the model of {before.root.name!r}, which is not there",
            hint=f"shakedown train {before.root.name} --config CONFIG",
        )
    return str(before.export)
