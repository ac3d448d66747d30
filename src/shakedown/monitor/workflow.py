"""The process of a run's workflow, and the Slurm jobs that it has submitted.

The Snakefile writes `workflow.json` as a workflow begins; the executor keeps a journal of its jobs
in the folder that is named there (executor/docs/further.md describes its form).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shakedown.core.continued import WORKFLOW_SCHEMA, ProgramCall
from shakedown.core.errors import UsageError
from shakedown.core.files import json_as, read_object, write_json
from shakedown.core.rows import JsonLines
from shakedown.processes.identity import Recorded
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.jobs import CLUSTER, JOB_ID

_JOURNAL = "journal.jsonl"
# The executor keeps the journals of 20 runs; one of a thousand jobs has less than a MB.
_MOST_JOURNALS = 100
_MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class WorkflowRun:
    """A snakemake: `folder` is its working directory, `jobs` the executor's folder.

    `ticks`: when the process started, in clock ticks since the start of the machine `boot`.
    `command`: how it was called.
    """

    folder: str
    jobs: str
    host: str
    pid: int
    ticks: int
    boot: str
    command: ProgramCall = field(default_factory=ProgramCall)

    @classmethod
    def here(cls, jobs: str, command: ProgramCall | None = None) -> Self:
        """The record of this process, with the executor's folder as it was given."""
        own = Recorded.of(os.getpid())
        folder = Path.cwd()
        place = (str(folder), str(folder / jobs), node_name())
        return cls(*place, own.pid, own.started, own.boot, command or ProgramCall())

    def write(self, path: Path) -> None:
        """Write atomically as JSON."""
        write_json(path, {"schema": WORKFLOW_SCHEMA, **asdict(self)})

    @property
    def lives(self) -> bool | None:
        """Whether it runs; None on another host, where nobody can see it."""
        process = Recorded(self.pid, self.ticks, self.boot)
        return process.lives if self.host == node_name() else None


def read_workflow(path: Path) -> WorkflowRun | None:
    """The workflow's record; None when no workflow has begun here.

    Raises:
        UsageError: it is not such a file. It is only displayed, so its owner does not matter.
    """
    if not path.exists():
        return None
    body = read_object(path, "record of a workflow", schema=WORKFLOW_SCHEMA)
    try:
        return json_as(WorkflowRun, body, unknown="ignore")
    except ValueError as error:
        raise UsageError(f"{path} is not a workflow record: {error}") from error


@dataclass(frozen=True)
class NotedJob:
    """The newest Slurm job that makes the files of a step.

    `folder` is the step's, relative to the run's: `preflight`, `stages/sft`. `outcome` is the
    executor's word for the end: succeeded, failed, cancelled or lost; empty while it has none. A
    Slurm job is known to be this one by its name, or by the mark of a server's.
    """

    folder: str
    job_id: str
    name: str
    cluster: str
    log: Path
    outcome: str = ""
    mark: str = ""


def noted_jobs(
    jobs: Path, run: Path, damage: Callable[[str], object] = lambda _text: None
) -> list[NotedJob]:
    """The newest job of each step of the run in `run`, out of the executor's journals in `jobs`.

    Args:
        damage: is called for each journal with other content.

    Raises:
        OSError: a journal cannot be read.
        ValueError: one is too large for a journal.
    """
    root, found = Path(os.path.realpath(run)), dict[str, NotedJob]()
    for journal in _journals(jobs):
        place, tokens = Path(), dict[str, list[NotedJob]]()
        events = JsonLines(journal, most=_MOST_BYTES)
        for event in events:
            match event:
                case {"event": "run", "place": {"path": str(path)}}:
                    place = Path(path)
                case {"event": "job", "token": str(token)}:
                    tokens[token] = list(_jobs_of(event, place, root))
                    found |= {job.folder: job for job in tokens[token]}
                case {"event": "renamed", "name": str(name), "as": str(shown)}:
                    for token, noted in tokens.items():
                        if any(job.name == name for job in noted):
                            tokens[token] = _changed(found, noted, name=shown)
                case {"event": "end", "token": str(token), "outcome": str(outcome)}:
                    _changed(found, tokens.get(token, []), outcome=outcome)
        if events.damage:
            damage(f"{journal}: {events.damage}")
    return list(found.values())


def _changed(found: dict[str, NotedJob], jobs: list[NotedJob], **changes: str) -> list[NotedJob]:
    """The jobs with `changes`, also in `found` where no newer one has taken their place."""
    changed = [replace(job, **changes) for job in jobs]  # type: ignore[arg-type]  # texts alone
    for old, new in zip(jobs, changed, strict=True):
        if found[old.folder] == old:
            found[old.folder] = new
    return changed


def _journals(jobs: Path) -> list[Path]:
    """The journals, newest last: their folders' names begin with the time."""
    try:
        runs = sorted(os.listdir(jobs))[-_MOST_JOURNALS:]
    except FileNotFoundError:  # nothing was submitted
        return []
    return [path for run in runs if (path := jobs / run / _JOURNAL).is_file()]


def _jobs_of(event: Mapping[str, Any], place: Path, root: Path) -> Iterator[NotedJob]:
    """One for each folder in the run that the job writes to: several for a group of rules."""
    match event:
        case {
            "identity": {"makes": list(makes)},
            "job_id": str(job_id),
            "name": str(name),
            "cluster": str(cluster),
            "log": str(log),
        } if JOB_ID.fullmatch(job_id) and CLUSTER.fullmatch(cluster):
            paths = [Path(os.path.realpath(place / m)) for m in makes if isinstance(m, str)]
            inside = [path.relative_to(root) for path in paths if root in path.parents]
            for folder in dict.fromkeys(path.parent.as_posix() for path in inside):
                yield NotedJob(folder, job_id, name, cluster, Path(log))
