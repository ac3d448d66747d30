"""Rows of the JSON-lines files that a run writes: one reader for all, whatever stands in them.

A row is a JSON object in UTF-8 on a line of its own. Any other line is damaged: it is passed over,
counted, and told by whoever reads. A last line without its end is being written, or was cut off by
a kill; it counts where it is an object all the same, and is no damage where it is not.
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

LONGEST_LINE = 1 << 25  # bytes: of an episode with all its calls, less than 1 MB


def any_object(_row: JsonRow) -> bool:
    """Every object is a row."""
    return True


def has_step(row: JsonRow) -> bool:
    """Whether it is a row of a stage's metrics, evaluations or changes."""
    return is_count(row.get("step"))


class JsonLines:
    """The rows of a file in its order; what else stands there is counted while they are read.

    `damaged`: lines that are no rows, `first` of them by its number (of what was read). `torn`: the
    last line was cut off. `whole`: bytes of the lines that have their end.

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
        """What to tell of lines that are no rows; empty without any."""
        if not self.damaged:
            return ""
        noun = "1 line is no row" if self.damaged == 1 else f"{self.damaged:,} lines are no rows"
        return f"{noun}, first {self.first}"

    def __iter__(self) -> Iterator[JsonRow]:
        """Read from the start, and count anew.

        Raises:
            OSError: it cannot be read, or is no regular file.
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
            stream.readline()  # what is left of a line, or the end of the one before
        return stream

    def _lines(self, stream: BinaryIO) -> Iterator[bytes]:
        """Each line; of one that is too long its last piece, which is never a row."""
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
    # A FIFO in its place would hold the reader for ever.
    return os.open(path, flags | os.O_NONBLOCK)


def by_step(rows: Iterable[JsonRow]) -> dict[int, JsonRow]:
    """Rows that have a step, ascending; of a step that was run again the last row counts."""
    return dict(sorted({row["step"]: row for row in rows}.items()))


def step_rows(path: Path) -> JsonLines:
    """The rows of a stage's metrics, evaluations or changes, as they were written."""
    return JsonLines(path, fits=has_step)
