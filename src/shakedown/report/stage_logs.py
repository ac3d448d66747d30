"""The logs of each stage of a workflow: those of its programs, its rules and its Slurm job."""

import json
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from shakedown.core.errors import ShakedownError, UsageError, did_you_mean
from shakedown.core.paths import AttemptPaths, RunPaths, ServerPaths, StagePaths
from shakedown.inference.folder import read_state
from shakedown.monitor.workflow import noted_jobs, read_workflow
from shakedown.report.logs import natural

_SUFFIX = ".log"
_REPORT = "report"
_TORCHRUN = re.compile(
    r"/torchrun-(\d{1,6})/[^/]+/attempt_(\d{1,6})/(\d{1,6})/(stdout|stderr)\.log$"
)


@dataclass(frozen=True)
class StageLogs:
    """A stage of the workflow, and the places of its logs.

    `folders`: those of its programs' logs, with the prefix of their names; `rules`: the logs of its
    rules, the first of which repeats the programs' output if `repeats` is set; `step`: its folder,
    relative to the run's; `ends`: a file that exists once it has ended.
    """

    name: str
    rules: Sequence[Path]
    step: str
    folders: Sequence[tuple[str, Path]] = ()
    repeats: bool = False
    ends: Path | None = None
    attempt: AttemptPaths | None = None
    servers: Sequence[ServerPaths] = ()

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be added."""
        if self.servers:
            return all(map(_is_over, self.servers))
        return self.ends is not None and self.ends.exists()

    def programs(self) -> dict[str, Path]:
        """The logs of the stage's own programs, by component.

        Raises:
            UsageError: a folder cannot be read.
        """
        found = {
            f"{front}{path.stem}": path for front, folder in self.folders for path in _logs(folder)
        }
        return found | (_torchrun_logs(self.attempt) if self.attempt else {})

    def rule_logs(self) -> dict[str, Path]:
        return {path.stem: path for path in self.rules if _is_regular(path)}


def find_stage(paths: RunPaths, wanted: str | None, attempt: int | None) -> StageLogs:
    """The requested stage, else the one that wrote last; the report's rule only if there is no
    other.

    Args:
        attempt: that of a training stage; None: the newest.

    Raises:
        UsageError: no such run, stage or attempt, or none has begun.
    """
    if not paths.root.is_dir():
        raise UsageError(
            f"{paths.root} is not a folder: expected a run's results, such as results/demo"
        )
    stages = {stage.name: stage for stage in _stages(paths)}
    if wanted is not None and wanted not in stages:
        guess = did_you_mean(wanted, stages)
        raise UsageError(
            f"{paths.root} has no stage {wanted!r}{guess}; it has: {', '.join(stages)}"
        )
    times = {name: _changed(stage) for name, stage in stages.items() if name != _REPORT}
    newest = max(times, key=lambda name: times[name])
    if wanted is None and not times[newest]:
        raise UsageError(f"{paths.root}: no stage has begun", hint="shakedown status RUN")
    stage = stages[wanted or newest]
    return stage if attempt is None else _at_attempt(paths.stage(stage.name), stage, attempt)


def _stages(paths: RunPaths) -> Iterator[StageLogs]:
    """All stages of the workflow, except training stages that have written nothing."""

    def rules(*names: str) -> list[Path]:
        return [paths.logs / f"{name}{_SUFFIX}" for name in names]

    servers = [paths.server(folder.name) for folder in _folders(paths.servers)]
    yield StageLogs("assets", rules("assets"), "assets", ends=paths.assets.file)
    for step, folders in (
        (paths.preflight, [("", paths.preflight.logs)]),
        (paths.agents, []),
        (paths.consistency, [("server-", paths.consistency.server)]),
    ):
        name = step.root.name
        yield StageLogs(name, rules(name, f"accept_{name}"), name, folders, ends=step.ran)
    yield StageLogs(
        "serve",
        rules("serve", "release_server"),
        "serve",
        [(f"{server.root.name}-", server.root) for server in servers],
        servers=servers,
    )
    yield StageLogs(_REPORT, rules("report"), "report", ends=paths.report)
    begun = [path.stem.removeprefix("train_") for path in sorted(paths.logs.glob("train_*.log"))]
    for name in dict.fromkeys([*(folder.name for folder in _folders(paths.stages)), *begun]):
        stage = paths.stage(name)
        numbers = stage.attempt_numbers()
        known = StageLogs(
            name,
            rules(f"train_{name}", f"diagnose_{name}", f"accept_{name}"),
            f"stages/{name}",
            repeats=True,
        )
        yield _at_attempt(stage, known, numbers[-1]) if numbers else known


def _at_attempt(paths: StagePaths, stage: StageLogs, number: int) -> StageLogs:
    numbers = paths.attempt_numbers()
    if number not in numbers:
        known = ", ".join(map(str, numbers)) or "none"
        raise UsageError(f"stage {stage.name} has no attempt {number}; it has: {known}")
    attempt = paths.attempt(number)
    # The rules' logs are those of the newest attempt.
    rules = stage.rules if number == numbers[-1] else ()
    return replace(
        stage, rules=rules, folders=[("", attempt.logs)], ends=attempt.outcome, attempt=attempt
    )


def find_logs(paths: RunPaths, stage: StageLogs, patterns: Sequence[str] = ()) -> dict[str, Path]:
    """The stage's logs by component, `rank2` before `rank10`.

    Args:
        patterns: names or shell patterns such as `trainer-*`; none: all that do not repeat others.

    Raises:
        UsageError: a pattern matches none, or a folder cannot be read.
    """
    programs, rules = stage.programs(), stage.rule_logs()
    slurm = _slurm_logs(paths, stage)
    found = {**slurm, **rules, **programs}
    # A job's output is also written to its rule's log.
    repeated = set(slurm) if rules or programs else set()
    if stage.repeats and programs:
        repeated |= {path.stem for path in stage.rules[:1]}
    names = sorted(found, key=natural)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names) or "none yet"
            guess = did_you_mean(pattern, names)
            raise UsageError(f"no component matches {pattern!r}{guess}; there are: {known}")
    if not patterns:
        return {name: found[name] for name in names if name not in repeated}
    return {n: found[n] for n in names if any(fnmatchcase(n, p) for p in patterns)}


def _slurm_logs(paths: RunPaths, stage: StageLogs) -> dict[str, Path]:
    """The log of the stage's newest Slurm job; those of successful jobs are removed."""
    try:
        workflow = read_workflow(paths.workflow)
        jobs = noted_jobs(Path(workflow.jobs), paths.root) if workflow else []
    except (ShakedownError, OSError, ValueError):  # `shakedown status` says so
        return {}
    own = [job for job in jobs if job.folder == stage.step and stage.rules]
    return {f"slurm-{job.job_id}": job.log for job in own if _is_regular(job.log)}


def _torchrun_logs(attempt: AttemptPaths) -> dict[str, Path]:
    """`trainer-rank3-stderr`: each rank's logs in torchrun's --log-dir, from its last restart.

    The stage has one folder per node, `torchrun-NODE/RUN/attempt_N/LOCAL_RANK/stderr.log`.
    """
    found: dict[str, tuple[int, Path]] = {}
    for path in attempt.logs.glob("torchrun-*/*/attempt_*/*/std*.log"):
        match = _TORCHRUN.search(path.as_posix())
        if match is not None and _is_regular(path):
            node, restart, local = map(int, match.groups()[:3])
            name = f"trainer-rank{node * _ranks_per_node(attempt) + local}-{match[4]}"
            found[name] = max(found.get(name, (-1, path)), (restart, path))
    return {name: path for name, (_, path) in found.items()}


def _ranks_per_node(attempt: AttemptPaths) -> int:
    try:
        body = json.loads(attempt.job.read_text(encoding="utf-8"))
        return int(body["config"]["ranks_per_node"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # ranks of only one node
        return 0


def _changed(stage: StageLogs) -> float:
    """The time of its newest log, in seconds since 1970; 0 if there is none."""
    files = [*stage.programs().values(), *stage.rule_logs().values()]
    attempt = [stage.attempt.root] if stage.attempt else []
    return max((_time(path) for path in (*files, *attempt)), default=0.0)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0


def _is_over(server: ServerPaths) -> bool:
    try:
        state = read_state(server.state)
    except ShakedownError:
        return False
    return state is not None and state.phase == "ended"


def _logs(folder: Path) -> list[Path]:
    return [path for path in _listing(folder) if path.suffix == _SUFFIX and _is_regular(path)]


def _folders(folder: Path) -> list[Path]:
    return [path for path in _listing(folder) if path.is_dir()]


def _listing(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from error


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:  # gone meanwhile, or a link to nothing
        return False
