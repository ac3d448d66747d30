"""The journal of submitted jobs and their ends, by which a new snakemake finds a dead one's jobs.

Each run of snakemake has its own folder below the executor's, with `journal.jsonl` in it:

    {"event": "run", "place": ...}                         the working directory
    {"event": "batch", "name": ..., "cluster": ...}        before sbatch
    {"event": "refused", "name": ...}                      sbatch said no
    {"event": "job", "name": ..., "job_id": ..., ...}      after sbatch
    {"event": "renamed", "name": ..., "as": ...}           Slurm shows a batch under another name
    {"event": "end", "token": ..., "outcome": ...}         the job needs no more attention
    {"event": "closed"}                                    nothing of this run is left

A batch without jobs is one whose sbatch may or may not have come through. Beside it are the files
of its jobs: `jobs/BATCH.json` with what a batch runs, `results/TOKEN.json` with how a job went, and
`jobs/TOKEN.ended` of a job that has ended while others of its batch have not.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from snakemake_executor_plugin_submitit import private
from snakemake_executor_plugin_submitit.identity import JobIdentity, WorkingFolder

Used = TypeVar("Used")
_FILE = "journal.jsonl"
_MARK = re.compile(r"[0-9a-f]{8}")
_JOB_ID = re.compile(r"[1-9][0-9]*(_[0-9]+)?")  # of a job or an array task


@dataclass(frozen=True)
class Entry:
    """One submitted job.

    `name` is that of its Slurm job, by which alone it is known to be ours; `cluster` is empty for
    this host's own; `token`, BATCH-INDEX, names its files within its run's folder; `log` is where
    its log is shown. `known_as`: the name that a plugin of the site has given it instead.
    """

    identity: JobIdentity
    label: str
    job_id: str
    name: str
    cluster: str
    token: str
    run: str
    log: str
    known_as: str = ""

    @property
    def batch(self) -> str:
        """The number of its batch, in its run."""
        return self.token.partition("-")[0]

    def result_file(self, base: Path) -> Path:
        return base / self.run / "results" / f"{self.token}.json"

    def batch_file(self, base: Path) -> Path:
        """The file that its node reads; without it, a job that Slurm runs again does nothing."""
        return base / self.run / "jobs" / f"{self.batch}.json"

    def end_mark(self, base: Path) -> Path:
        """The mark of its end, with which a job that Slurm runs again does nothing."""
        return base / self.run / "jobs" / f"{self.token}.ended"

    def log_file(self, base: Path) -> Path:
        """The job's standard output and error."""
        return base / self.run / "logs" / f"{self.token}.log"


def name_ending(run: str, batch: int) -> str:
    """How the name of a Slurm job ends: unlike that of any other batch, of any run."""
    return f"-{_mark(run)}.{batch}"


def is_name_of(run: str, name: str) -> bool:
    """Whether a Slurm job's name was given by this run; a folder without a mark has given none."""
    mark = _mark(run)
    if _MARK.fullmatch(mark) is None:
        return False
    return re.fullmatch(rf"[A-Za-z0-9_.+-]*-{mark}\.[0-9]+", name) is not None


def _mark(run: str) -> str:
    return run.rpartition("-")[2]


@dataclass
class OldRun:
    """An earlier run's unfinished jobs.

    `jobs`: without an end, by token; `lost`: the names of batches of which no job was noted, with
    the cluster that was asked for.
    """

    name: str
    jobs: dict[str, Entry] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


class JournalError(RuntimeError):
    """A journal that cannot be read or written; the message says which and what to do."""


class JobJournal:
    """The journal of this run; `base` is the executor's folder."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.place = WorkingFolder.here()
        # Sorts by time, and differs from every other run's.
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.folder = base / self.run
        # Job files hold commands: nobody else reads them, or writes what we would run. A folder
        # that was there before is its owner's business.
        base.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            base.mkdir(mode=0o700)
        self.folder.mkdir(mode=0o700)
        for name in ("jobs", "logs", "results"):
            (self.folder / name).mkdir(mode=0o700)
        # Held open and locked for as long as this process lives: others see that we are here.
        self._stream = private.create(self.folder / _FILE)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The outbox's thread notes jobs; Snakemake's own and the polling one note ends.
        self._lock = threading.Lock()
        # Tokens of jobs without an end, by run and batch.
        self._open: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._append_to(self.run, {"event": "run", "place": asdict(self.place)})

    def batch(self, name: str, cluster: str) -> None:
        """Note that a batch of jobs is about to be submitted under this name."""
        self._append_to(self.run, {"event": "batch", "name": name, "cluster": cluster})

    def refused(self, name: str) -> None:
        """Note that nothing was submitted under this name."""
        self._append_to(self.run, {"event": "refused", "name": name})

    def jobs(self, entries: Iterable[Entry]) -> None:
        """Note jobs that Slurm has accepted."""
        noted = list(entries)
        self._append_to(self.run, *({"event": "job", **asdict(entry)} for entry in noted))
        self.adopt(noted)

    def renamed(self, entry: Entry, name: str) -> None:
        """Note the name under which Slurm shows the entry's batch."""
        self._append_to(entry.run, {"event": "renamed", "name": entry.name, "as": name})

    def adopt(self, entries: Iterable[Entry]) -> None:
        """Answer for the files of these jobs, of this run or an earlier one, until they end."""
        with self._lock:
            for entry in entries:
                self._open[entry.run, entry.batch].add(entry.token)

    def end(self, entry: Entry, outcome: str) -> None:
        """Note the end where the job was submitted, which may be an earlier run's journal.

        Its files go with it: whatever Slurm does with the job from now on, it runs nothing.

        Raises:
            OSError: the end cannot be noted, or a file not be removed.
        """
        self._append_to(entry.run, {"event": "end", "token": entry.token, "outcome": outcome})
        with self._lock:
            others = self._open[entry.run, entry.batch]
            others.discard(entry.token)
            is_last = not others
        if is_last:
            self._remove_batch(entry)
        else:
            _mark_ended(entry, self.base)

    def _remove_batch(self, entry: Entry) -> None:
        # First the jobs' commands, then the marks that keep them from running.
        entry.batch_file(self.base).unlink(missing_ok=True)
        entry.result_file(self.base).unlink(missing_ok=True)
        for mark in entry.batch_file(self.base).parent.glob(f"{entry.batch}-*.ended"):
            mark.unlink(missing_ok=True)

    def close_run(self, run: str) -> None:
        """Note that nothing of `run` is left."""
        self._append_to(run, {"event": "closed"})

    def close(self) -> None:
        """Let others see that this run is over; nothing can be noted any more."""
        self._stream.close()

    @property
    def is_closed(self) -> bool:
        return self._stream.closed

    def _append_to(self, run: str, *events: Mapping[str, Any]) -> None:
        with self._lock:
            if run == self.run:
                _append(self._stream, *events)
                return
            with _trusted(private.append, self.base / run / _FILE) as stream:
                _append(stream, *events)


def _mark_ended(entry: Entry, base: Path) -> None:
    try:
        entry.result_file(base).rename(entry.end_mark(base))
    except FileNotFoundError:  # it has none, such as one that ran into its time limit
        entry.end_mark(base).touch(mode=0o600)


def _append(stream: IO[str], *events: Mapping[str, Any]) -> None:
    # The leading newline ends a line that a crash may have cut short.
    stream.write("".join(f"\n{json.dumps(event)}" for event in events) + "\n")
    stream.flush()
    os.fsync(stream.fileno())


def open_runs(base: Path, place: WorkingFolder) -> list[OldRun]:
    """Runs of this working directory that are not closed and whose snakemake is dead, oldest first.

    Raises:
        JournalError: a journal of another form, or that another user could have written.
    """
    dead = (path for path in _journals(base) if not _in_use(path))
    runs = (_replay(path, place) for path in dead)
    return [run for run in runs if run is not None]


def _journals(base: Path) -> list[Path]:
    """Of this user's runs: those of others, in a folder that is shared, are their business."""
    return [path for path in sorted(base.glob(f"*/{_FILE}")) if private.is_own(path.parent)]


def _in_use(path: Path) -> bool:
    """True while the snakemake that writes this journal lives."""
    # Open for writing, without which NFS gives no exclusive lock (flock(2)).
    with _trusted(private.append, path) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


def _replay(path: Path, place: WorkingFolder) -> OldRun | None:
    """The run's open ends; None when it is closed or another directory's."""
    events = list(_events(path))
    if _is_closed(events):
        return None
    run = OldRun(path.parent.name)
    for event in events:
        try:
            if event["event"] == "run" and not WorkingFolder(**event["place"]).is_same(place):
                return None
            _apply(run, event)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(
                f"{path} has an entry of another form ({error}); when none of its jobs runs any"
                f" more (squeue --me), remove the folder {path.parent}"
            ) from error
    return run


def _is_closed(events: Iterable[Mapping[str, Any]]) -> bool:
    return any(event.get("event") == "closed" for event in events)


def _apply(run: OldRun, event: dict[str, Any]) -> None:
    """
    Raises:
        KeyError, TypeError, ValueError: an event that no run notes. Jobs are cancelled by what
            stands here: a name or id that is not this run's must not reach scancel.
    """
    match event.pop("event", None):
        case "batch":
            _check_name(run, event["name"])
            run.lost[event["name"]] = event["cluster"]
        case "refused":
            run.lost.pop(event["name"], None)
        case "job":
            made = event.pop("identity")
            entry = Entry(JobIdentity(tuple(made["makes"]), made["how"]), **event)
            _check_name(run, entry.name)
            if _JOB_ID.fullmatch(entry.job_id) is None or entry.run != run.name:
                raise ValueError(f"job id {entry.job_id!r} of run {entry.run!r}")
            run.jobs[entry.token] = entry
            run.lost.pop(entry.name, None)
        case "renamed":
            for token, entry in run.jobs.items():
                if entry.name == event["name"]:
                    run.jobs[token] = replace(entry, known_as=str(event["as"]))
        case "end":
            run.jobs.pop(event["token"], None)


def _check_name(run: OldRun, name: str) -> None:
    if not is_name_of(run.name, name):
        raise ValueError(f"job name {name!r}")


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; one that a crash cut short is skipped."""
    text = _trusted(partial(private.read, errors="replace"), path)
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _trusted(use: Callable[[Path], Used], path: Path) -> Used:
    try:
        return use(path)
    except private.UntrustedFileError as error:
        raise JournalError(f"{error}; or remove the folder {path.parent}") from error


def prune(base: Path, *, keep: int) -> None:
    """Remove the oldest closed runs' folders beyond the newest `keep`."""
    paths = [path for path in _journals(base) if not _in_use(path)]
    closed = [path.parent for path in paths if _is_closed(_events(path))]
    for folder in closed[: max(0, len(closed) - keep)]:
        shutil.rmtree(folder, ignore_errors=True)
