"""Results of a stage, for its outcome: last metrics, accuracy before and after, provenance."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from shakedown.core.continued import restart_command
from shakedown.core.errors import StorageError, UsageError
from shakedown.core.outcome import Outcome
from shakedown.core.paths import StagePaths
from shakedown.core.provenance import CHECK, Made, is_made, judge, spans
from shakedown.core.rows import JsonRow, by_step, step_rows
from shakedown.core.verdict import Finding
from shakedown.training.checkpoint.fingerprint import fingerprint, shaping
from shakedown.training.stage.job import StageJob, read_job


def stage_metrics(paths: StagePaths) -> tuple[int, dict[str, float]]:
    """The last step and the figures of `metrics.jsonl` and of the attempts' evaluations.

    `sampled_accuracy_start` is the first attempt's, so that a resumed stage tells its whole gain.
    `staleness_max` is the highest of all steps, the other metrics are the last one's.
    """
    rows = read_rows(paths.metrics)
    last = rows[-1] if rows else {}
    metrics = {
        key: float(value)
        for key, value in last.items()
        if key != "step" and is_finite_number(value)
    }
    stalest = [row["staleness_max"] for row in rows if is_finite_number(row.get("staleness_max"))]
    if stalest:
        metrics["staleness_max"] = float(max(stalest))
    evaluations = []
    for number in paths.attempt_numbers():
        evaluations += read_rows(paths.attempt(number).evals)
    if evaluations:
        for key in ("sampled_accuracy", "greedy_accuracy"):
            for name, row in (("start", evaluations[0]), ("end", evaluations[-1])):
                if is_finite_number(row.get(key)):
                    metrics[f"{key}_{name}"] = float(row[key])
    return last.get("step", 0), metrics


def with_provenance(outcome: Outcome, job: StageJob, asked: Made | None = None) -> Outcome:
    """The outcome with the provenance of its steps; without a step as requested it has failed.

    Args:
        asked: None: what the newest attempt began with.
    """
    rows = [row for row in read_rows(job.paths.provenance) if is_made(row.get("made"))]
    if not rows:
        return outcome
    found = _judge(job, rows, asked or rows[-1]["made"], outcome.steps)
    others = [each for each in outcome.findings if each.check != CHECK]
    if found is None:
        return replace(outcome, findings=others)
    if found.status == "fail" and outcome.state == "completed":
        outcome = replace(outcome, state="failed", sentence=str(found.measured), next=found.remedy)
    elif found.status == "fail":  # another reason ended it: the finding is not why it failed
        found = replace(found, status="warn")
    return replace(outcome, findings=[*others, found])


def with_contents_now(outcome: Outcome, stage_root: Path) -> Outcome:
    """A completed stage's outcome, judged by the current data, template and code.

    It stays as it is where these are gone, and where the stage is a command.

    Raises:
        UntrustedError: others can change the attempt's job.
    """
    if outcome.state != "completed":
        return outcome
    paths = StagePaths(stage_root)
    try:
        job = replace(read_job(paths.attempt(outcome.attempt).job), stage_root=str(stage_root))
        return with_provenance(outcome, job, fingerprint(job))
    except (UsageError, StorageError):
        return outcome


def _judge(
    job: StageJob, rows: Sequence[Mapping[str, Any]], asked: Made, done: int
) -> Finding | None:
    ran = spans([{**row, "made": shaping(row["made"])} for row in rows], done)
    return judge(
        ran,
        shaping(asked),
        steps=job.config.steps,
        subject=job.stage,
        remedy="use a separate `run:` name for the new settings, or train again under this one: "
        + restart_command(job.paths),
        evidence=str(job.paths.provenance),
    )


def damage_findings(paths: StagePaths) -> list[Finding]:
    """A warning for each file of rows with other content, which figures and curves lack."""
    attempts = [paths.attempt(number) for number in paths.attempt_numbers()]
    files = [paths.metrics, paths.provenance, *(attempt.evals for attempt in attempts)]
    read = [(path, step_rows(path)) for path in files if path.exists()]
    for _, lines in read:
        deque(lines, maxlen=0)
    return [
        Finding(
            check="damaged_rows",
            status="warn",
            scope="role",
            subject=path.name,
            measured=lines.damage,
            expected="a JSON object with its step on each line",
            blame="environment",
            evidence=[str(path)],
            remedy="see who else writes this file, and whether the disk was full",
        )
        for path, lines in read
        if lines.damage
    ]


def read_rows(path: Path) -> list[JsonRow]:
    """The rows of a file of this stage by their step; of a file that is missing none."""
    return list(by_step(step_rows(path)).values()) if path.exists() else []


def resume_hint(paths: StagePaths) -> str:
    """Where an interrupted stage goes on."""
    again = "run the same command again to"
    try:
        name = (paths.checkpoints / "latest").read_text(encoding="utf-8")
        return f"{again} resume after step {int(name.strip().removeprefix('step_'))}"
    except (OSError, ValueError):
        return f"{again} start over: no checkpoint was written"


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value out of a row is one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float: a damaged row
        return False
