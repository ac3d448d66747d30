"""What was submitted and how it ended, on disk: a new snakemake finds a dead one's jobs again.

Each run of snakemake has its own folder below the executor's, with `journal.jsonl` in it:

    {"event": "batch", "tag": ...}                         before sbatch
    {"event": "job", "tag": ..., "key": ..., "job_id": ..., ...}   after sbatch
    {"event": "end", "token": ..., "outcome": ...}         the job needs no more attention
    {"event": "closed"}                                    nothing of this run is left

A batch without jobs is one whose sbatch may or may not have come through.
"""

import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from submitit.core.utils import JobPaths

_FILE = "journal.jsonl"


@dataclass(frozen=True)
class Entry:
    """One submitted job.

    `key` names what it makes, `fingerprint` how; `token` names its result file within its run's
    folder; `submitted` is in seconds since 1970.
    """

    key: str
    fingerprint: str
    job_id: str
    token: str
    tag: str
    run: str
    submitted: float

    def result_file(self, base: Path) -> Path:
        return base / self.run / "results" / f"{self.token}.json"

    def log_file(self, base: Path) -> Path:
        """What the job writes to its standard output and error: submitit's name for it."""
        return Path(JobPaths(base / self.run, job_id=self.job_id).stdout)


def name_ends(run: str) -> str:
    """How the names of this run's Slurm jobs end: sacct keeps names everywhere, comments not."""
    return f"-{run.rpartition('-')[2]}"


@dataclass
class OldRun:
    """An earlier run's open ends.

    `jobs`: without an end, by token; `lost_tags`: batches of which no job was noted.
    """

    name: str
    jobs: dict[str, Entry] = field(default_factory=dict)
    lost_tags: set[str] = field(default_factory=set)
    closed: bool = False


class JournalError(RuntimeError):
    """A journal that cannot be read or written; the message says which and what to do."""


class Journal:
    """The journal of this run; `base` is the executor's folder."""

    def __init__(self, base: Path) -> None:
        self.base = base
        # Sorts by time, and differs from every other run's.
        self.run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        self.folder = base / self.run
        (self.folder / "results").mkdir(parents=True)
        # Job files hold commands: nobody else reads them, or writes what we would run.
        for folder in (base, self.folder):
            folder.chmod(0o700)
        # Held open and locked for as long as this process lives: others see that we are here.
        self._stream = (self.folder / _FILE).open("a", encoding="utf-8")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The outbox's thread notes jobs; Snakemake's own and the polling one note ends.
        self._lock = threading.Lock()

    def batch(self, tag: str) -> None:
        """Note that a batch of jobs is about to be submitted under this tag."""
        self._append_to(self.run, {"event": "batch", "tag": tag})

    def jobs(self, entries: Iterable[Entry]) -> None:
        """Note jobs that Slurm has accepted."""
        self._append_to(self.run, *({"event": "job", **asdict(entry)} for entry in entries))

    def end(self, entry: Entry, outcome: str) -> None:
        """Note the end where the job was submitted, which may be an earlier run's journal."""
        self._append_to(entry.run, {"event": "end", "token": entry.token, "outcome": outcome})

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
            with (self.base / run / _FILE).open("a", encoding="utf-8") as stream:
                _append(stream, *events)


def _append(stream: IO[str], *events: Mapping[str, Any]) -> None:
    # The leading newline ends a line that a crash may have cut short.
    stream.write("".join(f"\n{json.dumps(event)}" for event in events) + "\n")
    stream.flush()
    os.fsync(stream.fileno())


def open_runs(base: Path) -> list[OldRun]:
    """Runs below `base` that are not closed and whose snakemake is dead, oldest first.

    Raises:
        JournalError: a journal of another form.
    """
    paths = [path for path in sorted(base.glob(f"*/{_FILE}")) if not _in_use(path)]
    return [run for run in map(_replay, paths) if not run.closed]


def _in_use(path: Path) -> bool:
    """True while the snakemake that writes this journal lives."""
    with path.open("a", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False


def _replay(path: Path) -> OldRun:
    run = OldRun(path.parent.name)
    for event in _events(path):
        try:
            _apply(run, event)
        except (KeyError, TypeError) as error:
            raise JournalError(
                f"{path} has an entry of another form ({error}); when none of its jobs runs any"
                f" more (squeue --me), remove the folder {path.parent}"
            ) from error
    return run


def _apply(run: OldRun, event: dict[str, Any]) -> None:
    match event.pop("event", None):
        case "batch":
            run.lost_tags.add(event["tag"])
        case "job":
            entry = Entry(**event)
            run.jobs[entry.token] = entry
            run.lost_tags.discard(entry.tag)
        case "end":
            run.jobs.pop(event["token"], None)
        case "closed":
            run.closed = True


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines; one that a crash cut short is skipped."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def prune(base: Path, *, keep: int) -> None:
    """Remove the oldest closed runs' folders beyond the newest `keep`."""
    paths = [path for path in sorted(base.glob(f"*/{_FILE}")) if not _in_use(path)]
    closed = [path.parent for path in paths if _replay(path).closed]
    for folder in closed[: max(0, len(closed) - keep)]:
        shutil.rmtree(folder, ignore_errors=True)
