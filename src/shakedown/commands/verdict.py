"""`shakedown verdict FILE`: print a verdict file for a person, and exit as its stage did."""

import argparse
from pathlib import Path

from shakedown.commands.arguments import add_strict
from shakedown.core.verdict import read_verdict, render_text

EXAMPLES = (
    "shakedown verdict results/demo/preflight/verdict.json",
    "shakedown verdict results/demo/stages/grpo/diagnosis.json --all",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="verdict.json, diagnosis.json or accepted.json")
    add_strict(parser)
    parser.add_argument("--all", action="store_true", help="list all findings that did not pass")


def run(args: argparse.Namespace) -> int:
    verdict = read_verdict(args.file)
    limit = len(verdict.findings) if args.all else 40
    print(render_text(verdict, limit=limit), flush=True)
    return int(verdict.exit_code(strict=args.strict))
