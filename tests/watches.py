"""A running `shakedown watch`, whose lines a test waits for."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Self, cast

from tests.slurm_fixtures import PATIENCE


class Watch:
    """It is killed at the end of the block, however that comes."""

    def __init__(self, *options: str, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "shakedown.cli", "watch", *options]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in cast("IO[str]", self.process.stdout):
            self._lines.put(line.rstrip())

    def until(self, words: str) -> list[str]:
        """Its lines until one has these words."""
        deadline, lines = time.monotonic() + PATIENCE, list[str]()
        while not lines or words not in lines[-1]:
            left = max(deadline - time.monotonic(), 0.01)
            try:
                lines.append(self._lines.get(timeout=left))
            except queue.Empty:
                raise AssertionError(f"{words!r} is not in {lines}") from None
        return lines

    def code(self) -> int:
        """How it ends."""
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        cast("IO[str]", self.process.stdout).close()
