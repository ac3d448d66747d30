"""Show on the terminal what a stage's components write into their logs."""

import contextlib
import sys
from pathlib import Path
from typing import IO

_MAX_LINES = 20  # a line more often than this a round is the log file's business
_MAX_CHARS = 300


class LogEcho:
    """Follow log files and print their new whole lines, each with its component's name.

    `patterns`: when given, only lines that contain one of these words are printed.
    """

    def __init__(self, logs: dict[str, Path], patterns: tuple[str, ...] = ()) -> None:
        self._logs = logs
        self._patterns = patterns
        self._offsets = dict.fromkeys(logs, 0)
        self._closed = False

    def show_new(self) -> None:
        """Print what was added since the last call; at most a few lines a component."""
        for name, path in self._logs.items():
            lines = [line for line in self._new_lines(name, path) if self._wanted(line)]
            if len(lines) > _MAX_LINES:
                lines = [*lines[:2], f"... {len(lines) - 4} lines, see {path}", *lines[-2:]]
            for line in lines:
                self.say(f"[{name}] {line[:_MAX_CHARS]}")

    def _wanted(self, line: str) -> bool:
        return not self._patterns or any(word in line for word in self._patterns)

    def _new_lines(self, name: str, path: Path) -> list[str]:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
            return self._read_from(name, stream)
        return []

    def _read_from(self, name: str, stream: IO[bytes]) -> list[str]:
        stream.seek(self._offsets[name])
        chunk = stream.read(1 << 20)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._offsets[name] += len(whole)
        return [line for line in whole.decode("utf-8", "replace").splitlines() if line.strip()]

    def say(self, line: str) -> None:
        """Print a line; without a terminal that went away: the run matters more than its echo."""
        if self._closed:
            return
        try:
            print(line, flush=True)
        except (BrokenPipeError, OSError):
            self._closed = True
            sys.stdout = None
