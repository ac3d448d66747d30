"""When each log grew: the supervisor notes the logs' sizes, so that lines need no time stamp.

The logs stay as their programs wrote them, for the parsers of the diagnosis, also those that srun
writes for ranks on other nodes. `log_times.jsonl` has a row for each look at which a log had
grown: {"time": Unix seconds, "sizes": {component: bytes}} with the logs that grew alone.
"""

import contextlib
import json
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.paths import AttemptPaths

_EVERY = 1.0  # seconds between looks; more in a long attempt, so that the file stays small
_LONGEST = 10.0
_PATIENCE = 1 / 3600  # of the time so far
_COST = 20.0  # looks take at most 1/20 of the time, also on a slow file system
_SUFFIX = ".log"
_MOST_BYTES = 64 << 20


class LogTimes:
    """Writes the rows. Not being able to never ends a run: the logs matter more than their times.

    Call `note` often; it looks when it is time to.
    """

    def __init__(self, attempt: AttemptPaths) -> None:
        self._attempt = attempt
        self._sizes: dict[str, int] = {}
        self._began: float | None = None
        self._next = float("-inf")

    def note(self, now: float) -> None:
        """Look at the logs if it is time to; `now` in monotonic seconds."""
        if now < self._next:
            return
        self._began = now if self._began is None else self._began
        began = time.monotonic()
        self._look()
        cost = time.monotonic() - began
        pause = min(max(_EVERY, _PATIENCE * (now - self._began)), _LONGEST)
        self._next = now + max(pause, _COST * cost)

    def close(self) -> None:
        """The last look."""
        self._look()

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            sizes = {name: log.size for name, log in find_logs(self._attempt.logs).items()}
            grown = {name: size for name, size in sizes.items() if size != self._sizes.get(name)}
            if grown:
                self._sizes |= grown
                row = json.dumps({"time": round(time.time(), 3), "sizes": grown})
                with self._attempt.log_times.open("a", encoding="utf-8") as out:
                    out.write(f"{row}\n")


@dataclass(frozen=True)
class Log:
    """One component's log: `size` in bytes, `changed` in Unix seconds, when it was found."""

    path: Path
    size: int
    changed: float


def find_logs(folder: Path) -> dict[str, Log]:
    """The regular `*.log` files of a folder by component; empty when there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    found = {}
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return {}
    for entry in entries:
        if not entry.name.endswith(_SUFFIX):
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or a link to nothing
            facts = entry.stat()
            if stat.S_ISREG(facts.st_mode):
                name = entry.name.removesuffix(_SUFFIX)
                found[name] = Log(Path(entry.path), facts.st_size, facts.st_mtime)
    return found


@dataclass
class Clock:
    """One log's times: up to `sizes[i]` bytes were there at `times[i]`; both ascend."""

    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, size: int, moment: float) -> None:
        """Rows that go back (a wrong clock, a damaged file) are brought in order."""
        if self.sizes and size <= self.sizes[-1]:
            return
        self.sizes.append(size)
        self.times.append(max([moment, *self.times[-1:]]))

    def at(self, end: int, changed: float) -> float | None:
        """When the byte before `end` was seen first; None without any note of this log.

        Args:
            changed: the log's last change, for what came after the last note.
        """
        if not self.times:
            return None
        place = bisect_left(self.sizes, end)
        if place < len(self.times):
            return self.times[place]
        return max(changed, self.times[-1])


def read_clocks(path: Path) -> dict[str, Clock]:
    """The clock of each component; damaged rows are passed over, a missing file is empty."""
    clocks: dict[str, Clock] = {}
    for row in _rows(path):
        moment, sizes = _number(row.get("time")), row.get("sizes")
        if moment is None or not isinstance(sizes, Mapping):
            continue
        for name, told in sizes.items():
            size = _number(told)
            if size is not None and size >= 0:
                clocks.setdefault(name, Clock()).add(int(size), moment)
    return clocks


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open("rb") as stream:
            body = stream.read(_MOST_BYTES)
    except OSError:
        return
    for line in body.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1 << 53 else None
