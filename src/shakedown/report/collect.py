"""Read all results of a run so far into a `RunView`."""

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shakedown.core.continued import next_command, stage_command
from shakedown.core.errors import UsageError
from shakedown.core.paths import AttemptPaths, RunPaths, ServerPaths, StagePaths
from shakedown.core.rows import by_step
from shakedown.core.verdict import Verdict
from shakedown.progress.patience import FACTOR, Patience
from shakedown.report.reader import (
    RunReader,
    finite,
    longest_step,
    mapping_of,
    patience_of,
    string,
    whole,
)
from shakedown.report.series import StepRows
from shakedown.report.view import AttemptView, Evaluation, RunView, ServerView, StageView

# The schema's own rule for names.
STAGE_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


def collect(root: Path) -> RunView:
    """Read a run's folder.

    Raises:
        UsageError: `root` is not a folder, or not a run's.
    """
    paths = RunPaths(root)
    if not root.is_dir() or not _is_run(paths):
        what = "contains no run" if root.is_dir() else "is not a folder"
        raise UsageError(
            f"{root} {what}: expected a run's results, such as {_example(root)}",
            hint="give results/<run>, the folder that holds config.resolved.yaml",
        )
    reader = RunReader(root)
    text, config = reader.config(paths.config)
    return RunView(
        root=root,
        now=time.time(),
        name=_name(config.get("run")) or root.resolve().name,
        config_text=text,
        preflight=reader.verdict(paths.preflight.verdict),
        bad_nodes=[
            line for line in reader.text(paths.preflight.bad_nodes).split("\n") if line.strip()
        ],
        servers=_servers(reader, paths),
        agents=reader.verdict(paths.agents.verdict),
        consistency=reader.verdict(paths.consistency.verdict),
        stages=_stages(reader, paths, config),
        unreadable=tuple(reader.unreadable),
        further=next_command(root, further=True),
    )


def _is_run(paths: RunPaths) -> bool:
    """Whether the folder has any file of a run or one of its commands."""
    verdicts = [step.verdict for step in (paths.preflight, paths.agents, paths.consistency)]
    made = [paths.config, paths.workflow, paths.stages, paths.servers, paths.assets.file]
    return any(path.exists() for path in (*made, *verdicts))


def _example(root: Path) -> str:
    """The run in the folder that changed last; else the demo's."""
    try:
        runs = [path for path in root.iterdir() if path.is_dir() and _is_run(RunPaths(path))]
        return str(max(runs, key=lambda path: path.stat().st_mtime, default="results/demo"))
    except OSError:
        return "results/demo"


def _servers(reader: RunReader, paths: RunPaths) -> list[ServerView]:
    return [_server(reader, paths.server(f.name)) for f in reader.folders(paths.servers)]


def _server(reader: RunReader, paths: ServerPaths) -> ServerView:
    state = reader.mapping(paths.state) or {}
    return ServerView(
        name=paths.root.name,
        root=paths.root,
        endpoint=reader.mapping(paths.endpoint) or {},
        phase=string(state.get("phase")),
        reason=string(state.get("reason")),
        crashed=state.get("returncode") is not None,
        verdict=reader.verdict(paths.verdict),
    )


def _stages(reader: RunReader, paths: RunPaths, config: Mapping[str, Any]) -> list[StageView]:
    """The stages of the config in order, then those found only on disk."""
    planned = {
        str(name): plan
        for name, plan in mapping_of(config.get("stages")).items()
        # A name from a damaged config must not lead out of the run's folder.
        if re.fullmatch(STAGE_NAME, str(name))
    }
    on_disk = [folder.name for folder in reader.folders(paths.stages)]
    names = dict.fromkeys([*planned, *on_disk])
    return [_stage(reader, paths.stage(name), planned.get(name)) for name in names]


def _stage(reader: RunReader, paths: StagePaths, plan: object) -> StageView:
    attempts = reader.attempts(paths)
    newest = attempts[-1] if attempts else None
    if plan is None and newest is not None:
        # `shakedown train` on its own writes no run config; the attempt has its stage's.
        plan = (reader.mapping(paths.attempt(newest.number).job) or {}).get("config")
    rows = by_step(reader.rows(paths.metrics))
    return StageView(
        name=paths.root.name,
        root=paths.root,
        algorithm=_name(mapping_of(plan).get("algorithm")),
        planned_steps=whole(mapping_of(plan).get("steps")),
        attempts=attempts,
        diagnosis=_current(reader, paths.diagnosis, newest),
        accepted=_current(reader, paths.accepted, newest),
        rows=rows,
        evaluations=_evaluations(reader, attempts),
        last_sign=reader.newest_change(paths, newest),
        cut_off_after=_cut_off_after(plan, rows),
        again=stage_command(paths),
    )


def _cut_off_after(plan: object, rows: StepRows) -> float:
    """Never less than by default: a supervisor with little patience still collects evidence."""
    allowed = patience_of(plan).of("phase", longest_step(rows.values()))
    return FACTOR * max(allowed, Patience.phase)


def _current(reader: RunReader, path: Path, newest: AttemptView | None) -> Verdict | None:
    """The verdict on the newest attempt, from the stage or archived with the attempt.

    A verdict older than the newest attempt is about the previous one.
    """
    verdict = reader.verdict(path)
    if newest is None:
        return verdict
    if verdict is None and newest.root != path.parent:
        verdict = reader.verdict(newest.root / path.name)
    if verdict is None or newest.outcome is None:
        return None
    begun, judged = _moment(newest.outcome.started), _moment(verdict.started)
    return None if begun and judged and judged < begun else verdict


def _evaluations(reader: RunReader, attempts: Sequence[AttemptView]) -> list[Evaluation]:
    """Held-out accuracies by step; the newest attempt counts for a step measured twice."""
    found: dict[int, Evaluation] = {}
    for attempt in attempts:
        for row in reader.rows(AttemptPaths(attempt.root).evals):
            step = row["step"]
            found[step] = Evaluation(
                step=step,
                sampled=finite(row.get("sampled_accuracy")),
                greedy=finite(row.get("greedy_accuracy")),
                samples=whole(row.get("samples")),
            )
    return [found[step] for step in sorted(found)]


def _moment(text: str) -> datetime | None:
    """A time with its zone, or None."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


def _name(value: object) -> str:
    """Only text: printing other YAML values (aliases of aliases) may never end."""
    return value if isinstance(value, str) else ""
