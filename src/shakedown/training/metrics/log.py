"""metrics.jsonl: one JSON row a step, without gap or double after a resume."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.private import open_own
from shakedown.core.rows import JsonLines, Row, by_step, step_rows


class MetricsLog:
    """Appends rows; each is on its way to disk before `append` returns."""

    def __init__(self, path: Path, *, fence: Callable[[], None] = lambda: None) -> None:
        """`fence`: raises where somebody else writes the file by now."""
        self._path, self._fence = path, fence

    def keep_until(self, step: int) -> int:
        """Drop the rows past `step`, those of steps that were run again, and lines that are no
        rows, which are told; returns how many went.

        Raises:
            StorageError: the file cannot be read or written.
            RefusedError: somebody else writes it by now; so in `append`.
        """
        self._fence()
        lines = step_rows(self._path)
        found = self._read(lines)
        kept = [row for number, row in by_step(found).items() if number <= step]
        write_text(self._path, "".join(f"{json.dumps(row)}\n" for row in kept))
        if lines.damage:
            print(f"{self._path}: {lines.damage}: left out from here", flush=True)
        return len(found) - len(kept) + lines.damaged + lines.torn

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row as one write.

        Raises:
            StorageError: the file cannot be written.
        """
        self._fence()
        line = json.dumps(row, allow_nan=False) + "\n"
        with storage_errors("write", self._path):
            handle = open_own(self._path, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(handle, "a", encoding="utf-8") as out:
                out.write(line)

    def _read(self, lines: JsonLines) -> list[Row]:
        if not self._path.exists():
            return []
        with storage_errors("read", self._path):
            return list(lines)
