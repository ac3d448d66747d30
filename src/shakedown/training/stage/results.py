"""What a stage reached, for its outcome: last metrics, and accuracy before and after."""

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

from shakedown.core.files import is_count
from shakedown.core.paths import StagePaths
from shakedown.core.verdict import Finding


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
    step = last.get("step")
    return step if is_count(step) else 0, metrics


def change_findings(paths: StagePaths) -> list[Finding]:
    """One finding for each attempt that went on with other settings than the one before."""
    return [
        Finding(
            check="settings_changed",
            status="pass",
            scope="config",
            subject=", ".join(row["changed"]),
            measured=f"after step {row['step']}, by attempt {row.get('attempt')}: "
            + ", ".join(f"{key} {' -> '.join(both)}" for key, both in row["changed"].items()),
            evidence=[str(paths.changes)],
        )
        for row in read_rows(paths.changes)
    ]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole JSON rows of a file; a row cut off by a kill is left out, a missing file is empty."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def resume_hint(paths: StagePaths) -> str:
    """Where an interrupted stage goes on."""
    again = "run the same command again to"
    try:
        name = (paths.checkpoints / "latest").read_text(encoding="utf-8")
        return f"{again} resume after step {int(name.strip().removeprefix('step_'))}"
    except (OSError, ValueError):
        return f"{again} start it anew: no checkpoint was written"


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value out of a row is one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float: a damaged row
        return False
