"""The idle limit of a persistent server: a forgotten one ends itself.

Each use restarts the idle time. It is recorded as the modification time of the file `lease` in the
server's folder.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from shakedown.core.errors import StorageError
from shakedown.core.private import open_own

ASK_SECONDS = 10.0  # at most between two looks at the engine's own counters


class IdleTimer:
    """The clients' side: every use of the server restarts its idle time.

    `with IdleTimer(path):` does so in a thread while the block runs, for work that lasts longer
    than the limit.
    """

    def __init__(self, path: Path, *, every: float = 30.0) -> None:
        """`every`: seconds between resets inside a `with` block."""
        self.path = path
        self._every = every
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def reset(self) -> None:
        """Restart the idle time.

        Raises:
            StorageError: the file cannot be written.
        """
        try:
            handle = open_own(self.path, os.O_WRONLY)
            try:
                os.utime(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(
                f"cannot note a use of the server in {self.path}: {error.strerror}"
            ) from error

    def __enter__(self) -> Self:
        self.reset()
        self._done.clear()
        self._thread = threading.Thread(target=self._keep, name="idle-timer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        while not self._done.wait(self._every):
            try:
                self.reset()
            except StorageError as error:
                # The work matters more than the server, which then ends at its limit.
                print(f"serve: {error}", flush=True)


class IdleLimit:
    """The daemon's side: how long the server has been unused.

    A use is a change of the file's time, or one that `asked` reports. Times are compared with each
    other, not with this machine's clock: the file may be on a file server whose clock differs.
    """

    def __init__(
        self, path: Path, seconds: float, *, asked: Callable[[], bool] = lambda: False
    ) -> None:
        """`asked`: whether there was a use since its last call, as the engine tells."""
        self._path, self.seconds, self._asked = path, seconds, asked
        # Twice at least within it: no limit is shorter than the time between two looks.
        self._every = min(ASK_SECONDS, seconds / 2)
        self._seen = self._stamp()
        self._used = self._looked = time.monotonic()

    def idle(self) -> float:
        """Seconds since a use was last noticed."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen, self._used = stamp, time.monotonic()
        if time.monotonic() - self._looked >= self._every:
            self._looked = time.monotonic()
            if self._asked():
                self._used = time.monotonic()
        return time.monotonic() - self._used

    def reached(self) -> bool:
        """Whether nothing has used the server for longer."""
        return self.idle() > self.seconds

    def _stamp(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            # An outage of the file system that is shorter than the limit ends no server: its start
            # and its end both count as a use.
            return 0
