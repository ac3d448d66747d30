"""`shakedown train STAGE`: run one training stage under supervision.

Writes the attempt's outcome and a copy as stages/STAGE/outcome.json. Exit code 1 says that the
stage hung or failed (its evidence is collected), 3 that it was interrupted and can go on.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from shakedown.commands.assets_file import read_assets
from shakedown.config import Config, layers, load_config
from shakedown.config.lint import trainer_world
from shakedown.core.errors import ConfigError, ExitCode, UsageError, did_you_mean
from shakedown.core.outcome import Outcome, State, read_outcome
from shakedown.core.paths import RunPaths
from shakedown.training.lint import require_sound
from shakedown.training.metrics.sinks import require_sinks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", help="a name under `stages:` of the config")
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="YAML files")
    parser.add_argument("--assets", type=Path, help="assets.json of `shakedown assets`")
    parser.add_argument("--run-dir", type=Path, help="results folder; default from the config")
    parser.add_argument(
        "--replay", type=Path, metavar="DIR", help="train on rollouts that grpo.record kept"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="input model; default: the stage before's"
    )


def run(args: argparse.Namespace) -> int:
    where = " + ".join(map(str, layers(*args.config)))
    config = require_sound(load_config(*args.config), where)
    if args.stage not in config.stages:
        known = ", ".join(config.stages)
        guess = did_you_mean(args.stage, config.stages)
        raise UsageError(f"{where} has no stage {args.stage!r}{guess}; it has: {known}")
    require_sinks(config.stages[args.stage].sinks)
    _tell_width()
    root = args.run_dir or Path(config.results) / config.run
    return _train(config, args, RunPaths(root))


def _tell_width() -> None:
    """The ranks write into files: here they learn how wide their lines may be on this terminal."""
    if sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))


def _train(config: Config, args: argparse.Namespace, paths: RunPaths) -> int:
    from shakedown.training.stage.job import StageJob
    from shakedown.training.stage.run import StagePlan, run_stage

    stage: str = args.stage
    assets = read_assets(args.assets or paths.assets / "assets.json")
    settings = config.stages[stage]
    job = StageJob(
        stage=stage,
        config=settings,
        model=_given_model(args.model) or _input_model(config, stage, paths, assets.model),
        dtype=config.model.dtype,
        train=assets.train,
        heldout=assets.heldout,
        reward=config.data.reward,
        reward_timeout=config.data.reward_timeout,
        reward_memory_gb=config.data.reward_memory_gb,
        seed=config.seed,
        world_size=trainer_world(settings),
        stage_root=str(paths.stage(stage).root.absolute()),
        replay=str(args.replay.absolute()) if args.replay else "",
    )
    plan = StagePlan(job, config.serve, config.cluster.srun_args, config.cluster.gpus_per_node)
    outcome = run_stage(plan)
    print(f"stage {stage} {outcome.state}: {outcome.sentence}", flush=True)
    print(f"  logs: {paths.stage(stage).latest / 'logs'}", flush=True)
    return int(_exit_code(outcome))


def _exit_code(outcome: Outcome) -> ExitCode:
    codes: dict[State, ExitCode] = {
        "completed": ExitCode.OK,
        "hung": ExitCode.FAIL,
        "failed": ExitCode.FAIL,
        "interrupted": ExitCode.BLOCKED,
    }
    return codes[outcome.state]


def _given_model(folder: Path | None) -> str:
    """The folder of `--model`, or nothing where it was not given.

    Raises:
        UsageError: it is no Hugging Face folder.
    """
    if folder is None:
        return ""
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {folder} is no Hugging Face folder: it has no config.json")
    return str(folder.absolute())


def _input_model(config: Config, stage: str, paths: RunPaths, first: str) -> str:
    """The model of the stage before this one, else the run's own.

    Raises:
        ConfigError: the stage before this one has not completed.
    """
    names = list(config.stages)
    position = names.index(stage)
    if position == 0:
        return first
    before = paths.stage(names[position - 1])
    done = before.accepted.exists() or (
        before.outcome.exists() and read_outcome(before.outcome).state == "completed"
    )
    if not done or not (before.export / "config.json").is_file():
        raise ConfigError(
            f"stage {stage!r} starts from the model of {before.root.name!r}, which is not there",
            hint=f"shakedown train {before.root.name} --config CONFIG",
        )
    return str(before.export)
