"""The lease of a persistent server: renewed by use, so that a forgotten server ends itself."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from shakedown.core.errors import StorageError
from shakedown.core.private import open_own

ASK_SECONDS = 10.0  # at most between two looks at the engine's own counters


class Lease:
    """Renews by setting the modification time of the lease file.

    `with Lease(path):` renews in a thread while the block runs, for work that lasts longer than
    the lease.
    """

    def __init__(self, path: Path, *, every: float = 30.0) -> None:
        """`every`: seconds between renewals inside a `with` block."""
        self.path = path
        self._every = every
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        """Note a use now.

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
            raise StorageError(f"cannot renew lease {self.path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        self.renew()
        self._done.clear()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        while not self._done.wait(self._every):
            try:
                self.renew()
            except StorageError as error:
                # The work matters more than the lease; the server then ends after its time.
                print(f"serve: {error}", flush=True)


class LeaseWatch:
    """The daemon's side: how long nothing has used the server.

    A use is a change of the file's time, or whatever `asked` tells of. Changes are noticed, not
    compared with this machine's clock: the file may lie on a file server whose clock differs.
    """

    def __init__(
        self, path: Path, seconds: float, *, asked: Callable[[], bool] = lambda: False
    ) -> None:
        """`asked`: whether there was a use since its last call, as the engine tells."""
        self._path, self.seconds, self._asked = path, seconds, asked
        # Twice at least in a lease: no lease is shorter than the time between two looks.
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

    def expired(self) -> bool:
        """Whether the lease has run out."""
        return self.idle() > self.seconds

    def _stamp(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            # An outage of the file system that is shorter than the lease ends no server: its start
            # and its end both count as a use.
            return 0
