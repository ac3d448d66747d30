"""`shakedown accept FILE`: the gate after a stage.

Good: writes the accepted verdict and exits 0. Not good: says so in one sentence and removes the
ticket, a file that the workflow tracks as the stage's output, so that the same `snakemake` command
runs exactly that stage again. Verdicts, evidence and attempts stay where they are.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from shakedown.files import read_object, write_text
from shakedown.paths import StagePaths
from shakedown.training.outcome import SCHEMA as OUTCOME_SCHEMA
from shakedown.training.outcome import Outcome, read_outcome
from shakedown.verdict import Finding, Stopwatch, Verdict, finish, read_verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a verdict.json or a stage's outcome.json")
    parser.add_argument("--diagnosis", type=Path, help="the stage's diagnosis.json")
    parser.add_argument("--ticket", type=Path, help="file to remove when it is not accepted")
    parser.add_argument("--out", type=Path, help="where to write the accepted verdict")
    parser.add_argument("--strict", action="store_true", help="do not accept warnings")


def run(args: argparse.Namespace) -> int:
    verdict = _judge(args.file, args.diagnosis)
    good = verdict.exit_code(strict=args.strict) == 0
    code = finish(verdict, args.out if good else None, strict=args.strict)
    if not good:
        if args.diagnosis is not None:
            _archive(args.diagnosis)
        if args.ticket is not None:
            args.ticket.unlink(missing_ok=True)
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
        advice = f"mend the cause (see {file}), then run the same command again"
        return verdict if verdict.status in ("PASS", "WARN") else replace(verdict, next=advice)
    outcome = read_outcome(file)
    return judge_outcome(outcome, read_verdict(diagnosis) if diagnosis else None, file.parent)


def judge_outcome(outcome: Outcome, diagnosis: Verdict | None, stage_root: Path) -> Verdict:
    """A completed stage passes; any other fails with the diagnosis' sentence."""
    clock = Stopwatch()
    completed = outcome.state == "completed"
    sentence = outcome.sentence
    evidence = [str(stage_root / "outcome.json")]
    if not completed and diagnosis is not None:
        sentence = f"{diagnosis.summary} ({outcome.sentence})"
        evidence.append(str(stage_root / "diagnosis.html"))
    finding = Finding(
        check="outcome",
        status="pass" if completed else "fail",
        scope="role",
        subject=outcome.failed_component or outcome.stage,
        measured=outcome.state,
        expected="completed",
        blame="none" if completed else "code",
        evidence=evidence,
        remedy="" if completed else f"read {stage_root / 'diagnosis.html'}",
    )
    return Verdict(
        stage=f"accept {outcome.stage}",
        status="PASS" if completed else "FAIL",
        summary=f"stage {outcome.stage} {outcome.state}: {sentence}",
        findings=[finding],
        metrics=outcome.metrics,
        started=clock.started,
        seconds=clock.seconds,
        next="" if completed else "mend the cause, then run the same snakemake command again",
    )
