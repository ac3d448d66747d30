"""Heartbeats of one host, copied in the rounds in which its stacks are taken."""

import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from shakedown.monitor.collect.bounded import run_bounded
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.progress.signs import Beat

READ_SECONDS = 10.0  # a file system that is gone never answers


@dataclass(frozen=True)
class Reading:
    """One look: the newest beat of each component, and what was missed.

    `taken` is when, `began` when the folder's last file was made: Unix time, 0 for unknown.
    """

    beats: list[Beat]
    taken: float
    began: float
    missed: str = ""


def read_beats(folder: Path) -> Reading:
    """The beats of a folder; bounded in time, never raising."""
    (files,) = run_bounded([partial(_files, folder)], 1, READ_SECONDS)
    taken = round(time.time(), 3)
    if isinstance(files, tuple):
        return Reading(files[0], taken, files[1])
    missed = f"heartbeats: {folder} was not read within {READ_SECONDS:.0f} s"
    return Reading([], taken, 0.0, missed)


def _files(folder: Path) -> tuple[list[Beat], float]:
    """The written beats, and when the folder's last file was made; 0 when that cannot be read."""
    # Records are overwritten in place, so a folder's time changes only when a file is made.
    try:
        began = round(folder.stat().st_mtime, 3)
    except OSError:
        began = 0.0
    return read_heartbeats(folder), began


def to_json(schema: str, number: int, reading: Reading) -> dict[str, object]:
    """The content of `round<number>/beats-<host>.json`."""
    times = {"taken": reading.taken, "began": reading.began}
    return {"schema": schema, "round": number, **times, "beats": [asdict(b) for b in reading.beats]}
