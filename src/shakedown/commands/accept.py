"""`shakedown accept FILE`: the gate after a stage.

Good: writes the accepted verdict and exits 0. Not good: says so in one sentence and removes the
file of `--remove-on-fail`, which the workflow tracks as the stage's output, so that the same
`snakemake` command runs exactly that stage again. Verdicts, evidence and attempts stay.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from shakedown.core.files import read_object, write_text
from shakedown.core.outcome import SCHEMA as OUTCOME_SCHEMA
from shakedown.core.outcome import judge_outcome, read_outcome
from shakedown.core.paths import StagePaths
from shakedown.core.verdict import Verdict, finish, read_verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a verdict.json or a stage's outcome.json")
    parser.add_argument("--diagnosis", type=Path, help="the stage's diagnosis.json")
    parser.add_argument(
        "--remove-on-fail", type=Path, help="a file to remove when it is not accepted"
    )
    parser.add_argument("--out", type=Path, help="where to write the accepted verdict")
    parser.add_argument("--strict", action="store_true", help="do not accept warnings")


def run(args: argparse.Namespace) -> int:
    verdict = _judge(args.file, args.diagnosis)
    good = verdict.exit_code(strict=args.strict) == 0
    code = finish(verdict, args.out if good else None, strict=args.strict)
    if not good:
        if args.diagnosis is not None:
            _archive(args.diagnosis)
        if args.remove_on_fail is not None:
            args.remove_on_fail.unlink(missing_ok=True)
    return code


def _archive(diagnosis: Path) -> None:
    """Keep the diagnosis with the attempt that it is about: the next attempt writes a new one."""
    attempt = StagePaths(diagnosis.parent).latest
    for path in (diagnosis, diagnosis.with_suffix(".html")):
        if attempt.is_dir() and path.exists():
            write_text(attempt / path.name, path.read_text(encoding="utf-8"))


def _judge(file: Path, diagnosis: Path | None) -> Verdict:
    if read_object(file, "verdict").get("schema") != OUTCOME_SCHEMA:
        verdict = read_verdict(file)
        advice = f"fix the cause (see {file}), then run the same command again"
        return verdict if verdict.status in ("PASS", "WARN") else replace(verdict, next=advice)
    outcome = read_outcome(file)
    return judge_outcome(outcome, read_verdict(diagnosis) if diagnosis else None, file.parent)
