"""Progress of a command, from its output: lines of its logs, a table, or TensorBoard's events.

Every number becomes a column of the stage's metrics.jsonl, as if our runtime had written it:
status, report and diagnosis read that file.
"""

import csv
import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.config.command import ProgressConfig
from shakedown.core.private import open_own
from shakedown.core.visible import masked
from shakedown.monitor.collect.logs import logs_in
from shakedown.report.logs import natural
from shakedown.training.stage.tensorboard import EventFile

_BLOCK = 1 << 24  # of a file and look: what is older is passed over
_LONGEST_LINE = 1 << 16
_MOST_COLUMNS = 200
_MOST_STEP = 1 << 53
_EVENTS = "*tfevents*"  # as every writer of TensorBoard's names its files
# `loss=1.5`, `'loss': 1.5`, `lr: 1e-4`, `reward/mean 0.3` with a sign between.
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_PAIR = re.compile(
    rf"['\"]?([A-Za-z_][\w./-]{{0,80}})['\"]?\s{{0,8}}[=:]\s{{0,8}}['\"]?({_NUMBER})(?![\w.])"
)
ProgressRow = dict[str, float]


@dataclass
class _Tail:
    """New whole lines of a file that grows. Those of a progress bar end with a carriage return."""

    path: Path
    offset: int = 0

    def new_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as stream:
                size = self.path.stat().st_size
                self.offset = self.offset if self.offset <= size else 0
                behind = size - self.offset > _BLOCK
                self.offset = size - _BLOCK if behind else self.offset
                stream.seek(self.offset)
                # Within a line, whose begin is missing.
                self.offset += len(stream.readline(_LONGEST_LINE)) if behind else 0
                block = stream.read(_BLOCK)
        except OSError:  # not there yet, or for now
            return []
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if not end and len(block) < _LONGEST_LINE:
            return []
        end = end or len(block)
        self.offset += end
        return re.split(r"[\r\n]+", block[:end].decode("utf-8", "replace"))


class ProgressSource(ABC):
    """A source of rows.

    `changes`: how often a row had another step than the one before it in its file: also a lower
    one, as of trainers that count anew in each epoch. A bar that is drawn again has the same.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._newest: dict[Path, float] = {}

    def _told(self, path: Path, row: ProgressRow) -> ProgressRow:
        self.changes += row["step"] != self._newest.get(path)
        self._newest[path] = row["step"]
        return row

    @abstractmethod
    def new_rows(self) -> Iterator[ProgressRow]:
        """Rows with a `step` that were added since the last call."""


class LogPattern(ProgressSource):
    """Lines of any log below a folder in which a pattern finds a step."""

    def __init__(self, pattern: str, logs: Path) -> None:
        super().__init__()
        self._pattern, self._logs = re.compile(pattern), logs
        self._tails: dict[Path, _Tail] = {}

    def new_rows(self) -> Iterator[ProgressRow]:
        try:
            paths = logs_in(self._logs)
        except OSError:
            return
        for path in paths:
            for whole in self._tails.setdefault(path, _Tail(path)).new_lines():
                line = whole[:_LONGEST_LINE]
                found = self._pattern.search(line)
                if found and (row := _row({**_pairs(line), **found.groupdict()}, "step")):
                    yield self._told(path, row)


class Table(ProgressSource):
    """A table that the trainer writes: JSON lines, or CSV with a head; `place` may be a glob.

    Rows that an earlier attempt left in it are not read again.
    """

    def __init__(self, place: str, column: str) -> None:
        super().__init__()
        self._place, self._column = place, column
        self._tails: dict[Path, _Tail] = {
            path: _Tail(path, path.stat().st_size) for path in self._paths()
        }
        self._heads: dict[Path, list[str]] = {}

    def new_rows(self) -> Iterator[ProgressRow]:
        for path in self._paths():
            tail = self._tails.setdefault(path, _Tail(path))
            for line in tail.new_lines():
                row = _row(self._cells(path, line), self._column)
                if row:
                    yield self._told(path, row)

    def _paths(self) -> list[Path]:
        return [path for path in expand(self._place) if path.is_file()]

    def _cells(self, path: Path, line: str) -> Mapping[str, object]:
        if line.lstrip().startswith("{"):
            try:
                body = json.loads(line)
            except (ValueError, RecursionError):
                return {}
            return body if isinstance(body, dict) else {}
        cells = next(csv.reader([line]), [])
        # A head is written once; a trainer that goes on may write it again.
        if self._column in cells:
            self._heads[path] = cells
            return {}
        return dict(zip(self._head(path), cells, strict=False))

    def _head(self, path: Path) -> list[str]:
        if path not in self._heads:
            try:
                with path.open(encoding="utf-8", errors="replace") as stream:
                    first = stream.readline(_LONGEST_LINE)
            except OSError:
                first = ""
            self._heads[path] = next(csv.reader([first]), [])
        return self._heads[path]


class Events(ProgressSource):
    """TensorBoard's event files in a folder and below, or in those that a glob names.

    A step's scalars are one row, as a trainer writes them one after another. Events that an earlier
    attempt left are not read again.
    """

    def __init__(self, place: str, tag: str) -> None:
        super().__init__()
        self._place, self._tag = place, tag
        self._files = {path: EventFile(path, path.stat().st_size) for path in self._paths()}

    def new_rows(self) -> Iterator[ProgressRow]:
        rows: dict[int, ProgressRow] = {}
        for path in self._paths():
            for step, scalars in self._files.setdefault(path, EventFile(path)).new_scalars():
                if not self._tag or self._tag in scalars:
                    rows.setdefault(step, {}).update(scalars)
        for step in sorted(rows):
            if row := _row({**rows[step], "step": step}, "step"):
                yield self._told(Path(self._place), row)

    def _paths(self) -> list[Path]:
        found: list[Path] = []
        for place in expand(self._place):
            found += place.rglob(_EVENTS) if place.is_dir() else [place] * place.is_file()
        return sorted(path for path in set(found) if path.match(_EVENTS))


def expand(place: str) -> list[Path]:
    """The paths that a glob names, by their numbers; one without stars is itself."""
    path = Path(place)
    if not re.search(r"[*?\[]", place):
        return [path]
    root = Path(path.anchor) if path.is_absolute() else Path()
    pattern = str(path.relative_to(path.anchor) if path.is_absolute() else path)
    return sorted(root.glob(pattern), key=lambda found: natural(str(found)))


def source_of(progress: ProgressConfig, place: str, logs: Path) -> ProgressSource:
    """`place`: the config's path with its placeholders filled in."""
    if progress.pattern:
        return LogPattern(progress.pattern, logs)
    return Events(place, progress.tag) if progress.tensorboard else Table(place, progress.column)


@dataclass
class Progress:
    """The highest step, and every row once in `metrics`, with how long its step took.

    A step that several ranks tell counts once. `now`: the step that was told last.
    """

    source: ProgressSource
    metrics: Path
    step: int = 0
    now: int = 0
    rows: int = 0
    _at: float = 0.0

    def look(self) -> list[ProgressRow]:
        """Read what is new; the rows that were written. A full disk loses rows, not the stage."""
        before, found = self.step, []
        for row in self.source.new_rows():
            self.now = int(row["step"])
            if row["step"] > self.step or not self.rows:
                self.step, self.rows = int(row["step"]), self.rows + 1
                found.append(row)
        if not found:
            return []
        now = time.monotonic()
        # Of steps that came between two looks only the mean is known; the first holds the start.
        seconds = round((now - self._at) / max(self.step - before, 1), 4)
        timed = {"step_seconds": seconds} if self._at else {}
        self._at = now
        self._write([{**row, **timed} for row in found])
        return found

    def _write(self, rows: Sequence[ProgressRow]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            descriptor = open_own(self.metrics, os.O_WRONLY | os.O_APPEND)
            with open(descriptor, "a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            print(f"cannot write {self.metrics}: {error.strerror}", flush=True)


def _pairs(line: str) -> dict[str, object]:
    return dict(_PAIR.findall(line))


def _row(cells: Mapping[str, object], column: str) -> ProgressRow | None:
    """The numbers of a row; None without a whole step."""
    numbers: ProgressRow = {}
    for name, value in list(cells.items())[:_MOST_COLUMNS]:
        number = _as_number(value)
        if number is not None and name != "step":
            numbers[masked(str(name))] = number
    step = _as_number(cells.get(column))
    if step is None or step < 0 or step != int(step) or step > _MOST_STEP:
        return None
    numbers.pop(column, None)
    return {"step": int(step), **numbers}


def _as_number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
