"""Heartbeats of one host: the files, and what living components have in their memory.

A beat that a process made and its file lacks seconds later tells of the file system, not of the
process.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from shakedown.hang.collect import proc
from shakedown.hang.collect.bounded import run_bounded
from shakedown.hang.collect.targets import Target
from shakedown.hang.heartbeat import Beat, LiveBeat, read_heartbeats, read_live

READ_SECONDS = 10.0  # a file system that is gone answers never
# A writer needs milliseconds, on crowded cores tenths of a second; rounds are 2 s apart.
LATE_SECONDS = 1.5

_Component = tuple[str, int]


@dataclass(frozen=True)
class Unwritten:
    """A beat that its file lacks `seconds` after it was made, and where its writer stands.

    `written_step` is the file's, -1 without one; `step`, `micro_batch` are the memory's, and
    `moves` says whether they went on between the rounds. `state` and `wchan` are the writer's as
    in /proc; `failures` counts its writes that failed.
    """

    role: str
    rank: int
    pid: int
    host: str
    seconds: float
    written_step: int
    step: int
    micro_batch: int
    moves: bool
    writer: int
    state: str
    wchan: str
    in_file_system: bool
    failures: int


@dataclass(frozen=True)
class Reading:
    """One look: the newest beat of each component, what is not written, what was missed.

    `taken` is when, `began` when the folder's last file was made: Unix time, 0 for unknown.
    """

    beats: list[Beat]
    late: list[Unwritten]
    taken: float
    began: float
    missed: str = ""


class BeatReader:
    """Reads the beats of a folder and of living targets, several rounds long."""

    def __init__(self) -> None:
        self._seen: dict[_Component, list[Beat]] = {}

    def read(self, folder: Path, targets: Sequence[Target]) -> Reading:
        """The newest beats of the folder's components and of the targets."""
        (files,) = run_bounded([partial(_files, folder)], 1, READ_SECONDS)
        live = [row for target in targets if (row := read_live(target.pid)) is not None]
        known, began = files if isinstance(files, tuple) else ([], 0.0)
        written: dict[_Component, Beat] = {(b.role, b.rank): b for b in known}
        now = time.monotonic()
        newest = dict(written)
        late = []
        for row in live:
            key = row.beat.role, row.beat.rank
            found = written.get(key)
            if not _has(found, row.beat):
                newest[key] = row.beat
            self._seen.setdefault(key, []).append(row.beat)
            lacking = [now - b.monotonic for b in self._seen[key] if not _has(found, b)]
            if max(lacking, default=0.0) >= LATE_SECONDS:
                late.append(_unwritten(row, found, max(lacking), self._seen[key][0]))
        beats, taken = [newest[key] for key in sorted(newest)], round(time.time(), 3)
        if isinstance(files, tuple):
            return Reading(beats, late, taken, began)
        missed = f"heartbeats: {folder} was not read within {READ_SECONDS:.0f} s"
        return Reading(beats, [], taken, began, missed)


def _files(folder: Path) -> tuple[list[Beat], float]:
    """The written beats, and when the folder's last file was made; 0 when that cannot be read."""
    try:
        began = round(folder.stat().st_mtime, 3)
    except OSError:
        began = 0.0
    return read_heartbeats(folder), began


def _has(written: Beat | None, beat: Beat) -> bool:
    """The file holds this beat of this process, or a newer one."""
    return written is not None and written.pid == beat.pid and written.count >= beat.count


def _unwritten(row: LiveBeat, written: Beat | None, seconds: float, first: Beat) -> Unwritten:
    state = proc.read_state(row.writer) if row.writer else proc.ProcState("X")
    return Unwritten(
        role=row.beat.role,
        rank=row.beat.rank,
        pid=row.beat.pid,
        host=row.beat.host,
        seconds=round(seconds, 1),
        written_step=written.step if written is not None else -1,
        step=row.beat.step,
        micro_batch=row.beat.micro_batch,
        moves=(row.beat.step, row.beat.micro_batch) > (first.step, first.micro_batch),
        writer=row.writer,
        state=state.state,
        wchan=state.wchan,
        in_file_system=row.in_file_system,
        failures=row.failures,
    )


def to_json(schema: str, number: int, reading: Reading) -> dict[str, object]:
    """The content of `round<number>/beats-<host>.json`."""
    times = {"taken": reading.taken, "began": reading.began}
    rows = {
        "beats": [asdict(beat) for beat in reading.beats],
        "unwritten": [asdict(row) for row in reading.late],
    }
    return {"schema": schema, "round": number, **times, **rows}
