"""Show on the terminal what a stage's components write into their logs."""

import sys
from collections.abc import Mapping
from pathlib import Path

from shakedown.report.logs import LogFollower

_MAX_LINES = 20  # a line more often than this a round is the log file's business
_MAX_CHARS = 300


class LogEcho:
    """Follow log files and print their new whole lines, each with its component's name."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        self._logs = logs
        self._follower = LogFollower()
        self._closed = False

    def show_new(self) -> None:
        """Print what was added since the last call; at most a few lines a component."""
        for name, path in self._logs.items():
            lines = [line for line in self._follower.new_lines(path) if line]
            if len(lines) > _MAX_LINES:
                lines = [*lines[:2], f"... {len(lines) - 4} lines, see {path}", *lines[-2:]]
            for line in lines:
                self.say(f"[{name}] {line[:_MAX_CHARS]}")

    def say(self, line: str) -> None:
        """Print a line; without a terminal that went away: the run matters more than its echo."""
        if self._closed:
            return
        try:
            print(line, flush=True)
        except (BrokenPipeError, OSError):
            self._closed = True
            sys.stdout = None  # or Python's own flush at exit fails on the same pipe
