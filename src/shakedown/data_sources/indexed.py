"""Rows of a source by number, each read from its place; memory holds only the places."""

import json
import tempfile
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shakedown.core.errors import UsageError
from shakedown.data_sources.read import RowBody, parsed_line, placed_rows, unreadable
from shakedown.data_sources.source import parse_source

_MARK = b"\xef\xbb\xbf"  # byte order mark, which some editors write


class IndexedRows:
    """All rows of a source. JSON lines are read in place; parquet and the hub, which have no access
    by number, are copied to a nameless temporary file that ends with the process.

    Raises:
        UsageError, CannotJudgeError: as `placed_rows`; for an invalid JSON line when it is read.
    """

    def __init__(self, source: str) -> None:
        self._source = parse_source(source)
        lines = not self._source.hub and not self._source.place.endswith(".parquet")
        self._file = self._opened() if lines else _copied(source)
        weakref.finalize(self, self._file.close)
        self._copied = not lines
        self._starts, self._numbers = array("q"), array("q")
        for number, start in _places(self._file):
            self._numbers.append(number)
            self._starts.append(start)
        if not self._starts:
            raise UsageError(
                f"data set {source} has no rows", hint="write one JSON object per line"
            )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> tuple[str, RowBody]:
        """A row and its place, as in `placed_rows`."""
        self._file.seek(self._starts[number])
        line = self._file.readline()
        if self._copied:
            place, body = json.loads(line)
            return place, body
        place = f"{self._source.place}, line {self._numbers[number]}"
        body = parsed_line(self._text(line), place)
        return place, self._source.format.row(body, place) if self._source.format else body

    def _opened(self) -> IO[bytes]:
        path = Path(self._source.place)
        try:
            return path.open("rb")
        except OSError as error:
            raise unreadable(path, error) from error

    def _text(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise unreadable(Path(self._source.place), error) from error


def _places(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """The number (from 1) and first byte of each non-empty line."""
    start = 0
    for number, line in enumerate(file, start=1):
        mark = len(_MARK) if number == 1 and line.startswith(_MARK) else 0
        if line[mark:].strip():
            yield number, start + mark
        start += len(line)


def _copied(source: str) -> IO[bytes]:
    """The trainable rows, one line each with its place."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rows
    for place, body in placed_rows(source):
        kept = {key: body[key] for key in ("messages", "answer", "tools") if key in body}
        file.write(json.dumps([place, kept], default=str).encode() + b"\n")
    file.seek(0)
    return file
