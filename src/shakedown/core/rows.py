"""Rows of the JSON-lines files that a run writes: one reader for all, whatever they contain.

A row is a JSON object in UTF-8 on one line. Any other line is damaged: it is skipped and counted,
and the reader reports it. A last line without a line feed is being written, or was cut off by a
kill: it counts as a row if it is an object anyway, and is not damage if it is not.
"""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shakedown.core.files import is_count

JsonRow = dict[str, Any]

LONGEST_LINE = 1 << 25  # bytes; an episode with all its calls has less than 1 MB


def any_object(_row: JsonRow) -> bool:
    """Every object is a row."""
    return True


def has_step(row: JsonRow) -> bool:
    """Whether it is a row of a stage's metrics, evaluations or changes."""
    return is_count(row.get("step"))


class JsonLines:
    """The rows of a file, in order; other lines are counted while reading.

    `damaged`: lines that are not rows; `first`: the number of the first of them (in what was read).
    `torn`: the last line was cut off. `whole`: bytes of the complete lines.

    Args:
        fits: whether an object is a row of this kind of file.
        longest: bytes of a line; a longer one is damaged, and never held in memory.
        most: bytes of a file; 0: of any size.
        tail: bytes at the end that are read, without the line that this cuts; 0: the whole file.
    """

    def __init__(
        self,
        path: Path,
        *,
        fits: Callable[[JsonRow], bool] = any_object,
        longest: int = LONGEST_LINE,
        most: int = 0,
        tail: int = 0,
    ) -> None:
        self._path, self._fits = path, fits
        self._longest, self._most, self._tail = longest, most, tail
        self._reset()

    def _reset(self) -> None:
        self.damaged = self.first = self.whole = 0
        self.torn = False

    @property
    def damage(self) -> str:
        """A note on lines that are not rows; empty if there are none."""
        if not self.damaged:
            return ""
        noun = (
            "1 line is not a row" if self.damaged == 1 else f"{self.damaged:,} lines are not rows"
        )
        return f"{noun}, first {self.first}"

    def __iter__(self) -> Iterator[JsonRow]:
        """Read from the start, and count again.

        Raises:
            OSError: it cannot be read, or is not a regular file.
            ValueError: it has more than `most` bytes.
        """
        return (row for _, row in self.numbered())

    def numbered(self) -> Iterator[tuple[int, JsonRow]]:
        """The rows with the numbers of their lines, from 1; raises as `__iter__`."""
        self._reset()
        with self._open() as stream:
            for number, line in enumerate(self._lines(stream), start=1):
                row = self._row(line)
                if row is not None:
                    yield number, row
                else:
                    self._pass_over(number, line)

    def _open(self) -> BinaryIO:
        stream = open(self._path, "rb", opener=_without_waiting)  # noqa: SIM115 - closed by who asks
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode):
            stream.close()
            raise OSError(errno.EINVAL, "not a regular file", str(self._path))
        if self._most and facts.st_size > self._most:
            stream.close()
            raise ValueError(f"{self._path} has more than {self._most} bytes")
        if self._tail and facts.st_size > self._tail:
            stream.seek(facts.st_size - self._tail - 1)
            stream.readline()  # the rest of a line, or the end of the one before
        return stream

    def _lines(self, stream: BinaryIO) -> Iterator[bytes]:
        """Each line; of one that is too long only the last piece, which is never a row."""
        while line := stream.readline(self._longest + 1):
            size = len(line)
            while len(line) > self._longest and not line.endswith(b"\n"):
                line = stream.readline(self._longest + 1)
                size += len(line)
            ended = line.endswith(b"\n")
            self.whole += size if ended else 0
            yield line if size <= self._longest + 1 else (b"\0\n" if ended else b"\0")

    def _row(self, line: bytes) -> JsonRow | None:
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            return None
        return row if isinstance(row, dict) and self._fits(row) else None

    def _pass_over(self, number: int, line: bytes) -> None:
        if not line.endswith(b"\n"):
            self.torn = True
        elif line.strip():
            self.damaged += 1
            self.first = self.first or number


def _without_waiting(path: str, flags: int) -> int:
    # A FIFO in its place would block the reader forever.
    return os.open(path, flags | os.O_NONBLOCK)


def by_step(rows: Iterable[JsonRow]) -> dict[int, JsonRow]:
    """Rows that have a step, ascending; the last row of a repeated step counts."""
    return dict(sorted({row["step"]: row for row in rows}.items()))


def step_rows(path: Path) -> JsonLines:
    """The rows of a stage's metrics, evaluations or changes, as they were written."""
    return JsonLines(path, fits=has_step)
