"""metrics.jsonl: one JSON row a step, without gap or double after a resume."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.private import open_own


class MetricsLog:
    """Appends rows; each is on its way to disk before `append` returns."""

    def __init__(self, path: Path, *, fence: Callable[[], None] = lambda: None) -> None:
        """`fence`: raises where somebody else writes the file by now."""
        self._path, self._fence = path, fence

    def keep_until(self, step: int) -> int:
        """Drop the rows past `step` and a last row that was cut off; returns how many went.

        Raises:
            StorageError: the file cannot be read or written.
            RefusedError: somebody else writes it by now; so in `append`.
        """
        self._fence()
        rows, dropped = [], 0
        for line in self._lines():
            row = _parse(line)
            if row is not None and row["step"] <= step:
                rows.append(line)
            else:
                dropped += 1
        write_text(self._path, "".join(f"{line}\n" for line in rows))
        return dropped

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

    def _lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with storage_errors("read", self._path):
            return self._path.read_text(encoding="utf-8", errors="replace").splitlines()


def _parse(line: str) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
