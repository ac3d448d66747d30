"""`shakedown accept FILE`: the gate after a stage.

If the result is good, it writes the accepted verdict and exits 0. If not, it says why in one
sentence and removes the file of `--remove-on-fail`, which the workflow tracks as the stage's
output, so that the same `snakemake` command runs exactly that stage again. Verdicts, evidence and
attempts stay.

A training stage is good only if its steps ran with the data, the template and the code as they are.
"""

import argparse
from pathlib import Path

from shakedown.commands.arguments import add_strict
from shakedown.core.outcome import archive_diagnosis, judge_file
from shakedown.core.verdict import finish

EXAMPLES = (
    "shakedown accept results/demo/preflight/verdict.json --strict",
    "shakedown accept results/demo/stages/grpo/outcome.json"
    " --diagnosis results/demo/stages/grpo/diagnosis.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a verdict.json or a stage's outcome.json")
    parser.add_argument("--diagnosis", type=Path, metavar="FILE", help="the stage's diagnosis.json")
    parser.add_argument(
        "--remove-on-fail",
        type=Path,
        metavar="FILE",
        help="file to remove if the stage is not accepted",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the accepted verdict"
    )
    add_strict(parser)


def run(args: argparse.Namespace) -> int:
    from shakedown.training.stage.results import with_contents_now

    verdict = judge_file(args.file, args.diagnosis, again=with_contents_now)
    good = verdict.exit_code(strict=args.strict) == 0
    code = finish(verdict, args.out if good else None, strict=args.strict)
    if not good:
        # First, because once the workflow's file is gone the next attempt writes another diagnosis.
        if args.diagnosis is not None:
            archive_diagnosis(args.diagnosis)
        if args.remove_on_fail is not None:
            args.remove_on_fail.unlink(missing_ok=True)
    return code
