"""episodes.jsonl: one line per episode, written when it ends.

A process that is killed loses no episode that had ended; the line that it was writing is torn.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.private import open_own
from shakedown.core.rows import JsonLines


class EpisodeLines:
    """A new file of episodes that replaces an older one; use it in a `with` block.

    Only its owner (and with `group_reads` its group) can read it: prompts may be secret.

    Raises:
        StorageError: it cannot be written.
        UntrustedError: the path holds something that another user could have put there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        write_text(path, "")  # who reads the older one keeps it
        with storage_errors("write", path):
            handle = open_own(path, os.O_WRONLY | os.O_APPEND)
        self._stream = os.fdopen(handle, "w", encoding="utf-8", errors="replace")

    def add(self, line: Mapping[str, Any]) -> None:
        """Append one episode; it is in the file when this returns.

        Raises:
            StorageError: it cannot be written.
        """
        with storage_errors("write", self._path):
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        with storage_errors("write", self._path):
            self._stream.close()


def read_episodes(path: Path) -> JsonLines:
    """The episodes of a file, one by one."""
    return JsonLines(path)
