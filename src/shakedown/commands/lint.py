"""`shakedown lint CONFIG...`: say what is wrong with a config before anything is started."""

import argparse
from dataclasses import replace
from pathlib import Path

from shakedown.commands.arguments import add_strict
from shakedown.config import dump_config, layers, load_config
from shakedown.config.foreign import judge_foreign
from shakedown.core.continued import begin_command
from shakedown.core.errors import ExitCode, UsageError
from shakedown.core.verdict import finish
from shakedown.training.lint import judge_config

EXAMPLES = (
    "shakedown lint config/config.yaml my.yaml --resolved",
    "shakedown lint gsm8k_grpo.yaml --source ~/AReaL",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="+", type=Path, help="config files; later ones override earlier ones"
    )
    parser.add_argument("--resolved", action="store_true", help="print the resolved config too")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="checkout or installation of AReaL or prime-rl, for a config of theirs",
    )
    add_strict(parser)


def run(args: argparse.Namespace) -> int:
    verdict = judge_foreign(args.config, args.source)
    if verdict is None:
        if args.source:
            raise UsageError("--source is for configs of AReaL and prime-rl")
        config = load_config(*args.config)
        verdict = judge_config(config, layers(*args.config))
        if verdict.status != "FAIL":
            verdict = replace(verdict, next=begin_command(args.config))
        if args.resolved:
            print(dump_config(config))
    elif args.resolved:
        raise UsageError("--resolved works only with shakedown's own configs")
    code = finish(verdict, None, strict=args.strict)
    # A fault in a config is a config error, whichever check finds it.
    return int(ExitCode.USAGE) if verdict.status == "FAIL" else code
