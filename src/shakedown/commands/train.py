"""`shakedown train STAGE`: run one training stage under supervision.

Writes the attempt's outcome and a copy for the stage. Exit code 1 means that the stage hung or
failed (its evidence is collected), 3 that it was interrupted and can continue. With --plan nothing
runs: memory and speed are predicted from the config and the model's config.json; exit code 1 means
that it does not fit the GPU, 3 that the model's sizes are not known here.
"""

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

from shakedown.commands.arguments import add_config, add_debug, debug_asked, run_config, whole
from shakedown.config import Config, layers
from shakedown.core.continued import note_stage_command
from shakedown.core.errors import ExitCode, UsageError, did_you_mean
from shakedown.core.paths import AttemptPaths, RunPaths
from shakedown.core.private import check_own
from shakedown.core.verdict import finding_line
from shakedown.training.forecast.show import render
from shakedown.training.forecast.stage import plan_of
from shakedown.training.lint import require_sound
from shakedown.training.lint_rules.model_sizes import decoder_of
from shakedown.training.metrics.sinks import require_sinks

EXAMPLES = (
    "shakedown train sft --config config/config.yaml",
    "shakedown train grpo --config my.yaml --model ./my-model --plan",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", help="name of a stage under `stages:` in the config")
    add_config(parser)
    parser.add_argument(
        "--assets",
        type=Path,
        metavar="FILE",
        help="assets.json of `shakedown assets` (default: the run's)",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="results folder (default: the config's)"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="DIR", help="train on rollouts recorded by grpo.record"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="input model (default: the previous stage's result, else the run's model)",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="train from the first step; earlier progress is kept with the stage's newest attempt",
    )
    parser.add_argument(
        "--plan", action="store_true", help="predict memory and speed without running anything"
    )
    parser.add_argument(
        "--length",
        type=whole(1),
        metavar="TOKENS",
        help="with --plan: longest row in tokens (default: serve.max_model_len)",
    )
    parser.add_argument("--json", action="store_true", help="with --plan: print JSON")
    add_debug(parser)


def needs_extra(args: argparse.Namespace) -> bool:
    """A trainer given as a command brings its own packages, and a plan needs none."""
    return not args.plan and args.stage not in run_config(args.config).command_stages


def run(args: argparse.Namespace) -> int:
    files = layers(*args.config)
    config = run_config(args.config)
    if args.stage not in config.stages:
        known = ", ".join(config.stages)
        guess = did_you_mean(args.stage, config.stages)
        where = " + ".join(map(str, files))
        raise UsageError(f"{where} has no stage {args.stage!r}{guess}; it has: {known}")
    paths = RunPaths(args.run_dir) if args.run_dir else config.paths
    assets = args.assets or paths.assets.file
    if args.plan:
        return _plan(args, config, assets)
    if args.json or args.length:
        raise UsageError("--json and --length require --plan")
    require_sound(with_model(config, args.model, assets), files)
    # Checked before a process is started: a rank would report it in its log, minutes later.
    own = config.own_stages.get(args.stage)
    require_sinks(own.sinks if own else ())
    debug_asked(args)
    _tell_width()
    from shakedown.training.stage.plan import plan_any
    from shakedown.training.stage.run import run_stage

    check_own(paths.root)
    plan = plan_any(config, args.stage, paths, assets, model=args.model, replay=args.replay)
    note = partial(note_stage_command, paths.stage(args.stage), args.called_with, args.config)
    outcome = run_stage(plan, restart=args.restart, begin=note)
    print(f"stage {args.stage} {outcome.state}: {outcome.sentence}", flush=True)
    for found in outcome.findings:
        if found.status == "warn":
            print(finding_line(found), flush=True)
    if outcome.next:
        print(f"  next: {outcome.next}", flush=True)
    print(f"  logs: {AttemptPaths(paths.stage(args.stage).latest).logs}", flush=True)
    return int(outcome.exit_code)


def _plan(args: argparse.Namespace, config: Config, assets: Path) -> int:
    """Print what the stage will need and reach; the model's folder needs only its config.json."""
    if args.restart:
        raise UsageError("--restart runs the stage and --plan runs nothing: give only one of them")
    if args.stage not in config.own_stages:
        raise UsageError(
            f"--plan: stage {args.stage!r} is a command, whose memory use cannot be predicted"
        )
    source = str(args.model) if args.model else with_model(config, None, assets).model.source
    model = decoder_of(source)
    plan = plan_of(config, args.stage, model, length=args.length)
    print(json.dumps(plan.to_json()) if args.json else render(plan), flush=True)
    return int(ExitCode.FAIL if plan.fits is False else ExitCode.OK)


def with_model(config: Config, model: Path | None, assets: Path) -> Config:
    """The config that the stage runs with: its model is `--model`, else that of the assets."""
    from shakedown.training.assets import read_assets

    if model is None and assets.is_file():
        model = Path(read_assets(assets).model)
    # A path that is not a model folder is reported where it is used.
    if model is None or not (model / "config.json").is_file():
        return config
    source = config.model.model_copy(update={"source": str(model)})
    return config.model_copy(update={"model": source})


def _tell_width() -> None:
    """Tell the ranks, which write to files, how wide lines may be on this terminal."""
    if sys.stdout.isatty():
        # Keep a width that the user has set.
        os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
