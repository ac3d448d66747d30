"""Profile files: moved from a node's scratch folder to the run's, recorded there, and listed."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shakedown.core.errors import ShakedownError
from shakedown.core.files import atomic_open, is_count, read_json_as, write_json
from shakedown.profiling.capture import STEPS, TRACE, tell
from shakedown.slurm.hostlist import node_name

REPORT = ".nsys-rep"
SCRATCH = "shakedown-profile-"  # prefix of a launcher's folder in TMPDIR
# A larger file stays where it is, as Nsight Systems would take minutes to open it (our choice).
LARGEST = 4 << 30  # bytes
# Space kept free for the run itself: checkpoints, metrics, logs.
_SPARE = 1 << 30  # bytes
_RECORD = "profile.json"


@dataclass(frozen=True)
class ProfileFile:
    """A file in the record's own folder; `first` and `last` are the steps in it, if known."""

    name: str
    bytes: int
    first: int | None = None
    last: int | None = None


@dataclass
class ProfileRecord:
    """The fate of one worker's profile: `<host>/<component>-<pid>.profile.json`.

    `tool` is `nsys` or `torch`, `steps` the requested range, `pid` that of the launcher. `scratch`
    is on `host` and holds the files that were not moved; `said` is why there is no profile, or what
    is missing; `ended`: the worker has ended and all files that could be moved were.
    """

    worker: str
    component: str
    host: str
    pid: int
    tool: str
    steps: str
    scratch: str
    files: list[ProfileFile] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    ended: bool = False

    def path(self, target: Path) -> Path:
        return target / self.host / f"{self.component}-{self.pid}.{_RECORD}"

    def say(self, what: str) -> None:
        """Add a remark to the record and to the component's log, once."""
        if what not in self.said:
            self.said.append(what)
            tell(f"profile of {self.component}: {what}")


def write_record(record: ProfileRecord, target: Path) -> None:
    """Write it beside its files or, if that fails, print it: a run continues without it."""
    try:
        write_json(record.path(target), asdict(record))
    except ShakedownError as error:
        tell(f"profile of {record.component}: {error}; its files: {record.scratch}")


def read_records(target: Path) -> tuple[list[ProfileRecord], list[str]]:
    """The records of an attempt, and the faults of those that cannot be read."""
    found: list[ProfileRecord] = []
    faults: list[str] = []
    for path in sorted(target.glob(f"*/*.{_RECORD}")):
        try:
            found.append(read_json_as(ProfileRecord, path, "profile record"))
        except ShakedownError as error:
            faults.append(str(error))
    return found, faults


def bring(record: ProfileRecord, target: Path, suffixes: tuple[str, ...] = (TRACE, REPORT)) -> None:
    """Move the finished files of the record's scratch folder to the run's, whole or not at all.

    A file that cannot be moved stays where it is, with a remark in the record.
    """
    for path in sorted(_finished(Path(record.scratch), suffixes)):
        if any(said.startswith(f"{path.name} was not moved") for said in record.said):
            continue
        try:
            size = path.stat().st_size
            _check_room(size, target)
            with (
                path.open("rb") as source,
                atomic_open(record.path(target).parent / path.name, "wb") as sink,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
        except (OSError, ShakedownError) as error:
            reason = str(error).partition("\n")[0]
            record.say(
                f"{path.name} was not moved, it is on {record.host} in {path.parent}: {reason}"
            )
            continue
        first, last, said = _steps_of(path)
        record.files.append(ProfileFile(path.name, size, first, last))
        if said:
            record.say(said)
        write_record(record, target)
        path.unlink(missing_ok=True)


def finish(record: ProfileRecord, target: Path) -> None:
    """Move the rest once the worker has ended; an empty scratch folder is removed."""
    scratch = Path(record.scratch)
    bring(record, target)
    if not record.files and not record.said:
        record.say(_why_none(record, scratch))
    if not any(_finished(scratch, (TRACE, REPORT))) and scratch.name.startswith(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
    record.ended = True
    write_record(record, target)


def finish_here(target: Path) -> list[ProfileRecord]:
    """Do the same for launchers on this machine that were killed; returns all records.

    Call it once no process of the attempt lives.
    """
    records, _ = read_records(target)
    for record in records:
        if not record.ended and record.host == node_name():
            finish(record, target)
    return records


def lines(record: ProfileRecord, target: Path) -> Iterator[str]:
    """The record as lines of a list: its files with their steps, and its remarks."""
    who = f"{record.component} ({record.worker}) on {record.host}"
    for each in record.files:
        steps = f"steps {each.first} to {each.last}" if each.first else f"asked for {record.steps}"
        place = record.path(target).parent / each.name
        yield f"{who}, {record.tool}, {steps}, {_size(each.bytes)}: {place}"
    for said in record.said:
        yield f"{who}: {said}"
    if not record.ended:
        yield (
            f"{who}: still running, or killed before its files were moved: "
            f"any files are on {record.host} in {record.scratch}"
        )


def _finished(scratch: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Regular files with these suffixes that are complete (incomplete ones begin with a dot)."""
    try:
        with os.scandir(scratch) as entries:
            for entry in entries:
                hidden = entry.name.startswith(".")
                if (
                    not hidden
                    and entry.name.endswith(suffixes)
                    and entry.is_file(follow_symlinks=False)
                ):
                    yield Path(entry.path)
    except FileNotFoundError:
        return


def _check_room(size: int, target: Path) -> None:
    """Raises:
    OSError: the file is too large, or would fill the file system.
    """
    if size > LARGEST:
        raise OSError(f"{_size(size)} is more than {_size(LARGEST)}: profile fewer steps")
    free = shutil.disk_usage(target).free
    if size + _SPARE > free:
        raise OSError(f"not enough space: {_size(size)} needed, {_size(free)} free in {target}")


def _steps_of(path: Path) -> tuple[int | None, int | None, str]:
    """The notes of the profiled process beside its file: first and last step, and its remarks."""
    stem = path.name.removesuffix(TRACE).removesuffix(REPORT)
    return _read_steps(path.with_name(stem + STEPS))


def _read_steps(path: Path) -> tuple[int | None, int | None, str]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        first, last, said = body["first"], body["last"], str(body["said"])[:1000]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, None, ""
    return first if is_count(first) else None, last if is_count(last) else None, said


def _why_none(record: ProfileRecord, scratch: Path) -> str:
    """Why a worker left no file, as far as known."""
    told = [_read_steps(path) for path in sorted(_finished(scratch, (STEPS,)))]
    for first, last, said in told:
        if said:
            return said
        if first:
            return f"no file: it ended in step {last}, or could not write one (see its log)"
    return f"no file: it ran none of the steps {record.steps}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
