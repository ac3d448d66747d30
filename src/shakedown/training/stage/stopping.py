"""Stop requests: by a signal to a process, or by a file that ranks on all nodes see.

Signals to srun do not reach its ranks in time: it ends them at once. The supervisor creates the
file empty before it starts them, because a network file system may go on saying for a minute
that a file which was missing is missing; opening one that exists asks the server.
"""

import os
import time
from pathlib import Path

from shakedown.core.files import write_text
from shakedown.core.private import open_own

_LOOK_SECONDS = 0.2  # so that short steps do not wait for a file server


def prepare(path: Path) -> None:
    """Create the file of an attempt, empty: nobody has asked to stop.

    Raises:
        StorageError: it cannot be written.
    """
    write_text(path, "")


def ask(path: Path, reason: str) -> None:
    """Ask the ranks to stop. Written in place: another file of that name may be seen late."""
    with os.fdopen(open_own(path, os.O_WRONLY), "w", encoding="utf-8") as stream:
        stream.write(f"{reason}\n")


class StopFlag:
    """Whether this rank was asked to stop; the ranks agree on it at the end of a step.

    Args:
        path: the file to look into, for rank 0; the others have its word.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._requested = False
        self._looked = float("-inf")

    def request(self) -> None:
        """Ask this rank; for signal handlers."""
        self._requested = True

    @property
    def requested(self) -> bool:
        if not self._requested and self._path is not None:
            self._look(self._path)
        return self._requested

    def _look(self, path: Path) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            self._requested = bool(path.read_bytes())
        except FileNotFoundError:  # a rank that was started by hand
            self._path = None
