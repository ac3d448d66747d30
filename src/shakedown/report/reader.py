"""A reader of a run's files that does not trust them: broken files are listed and never fatal."""

import json
import math
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.config.load import read_yaml
from shakedown.core.errors import ConfigError, UsageError
from shakedown.core.outcome import Outcome, read_outcome
from shakedown.core.paths import AttemptPaths, StagePaths
from shakedown.core.rows import JsonRow, step_rows
from shakedown.core.verdict import Verdict, read_verdict
from shakedown.progress.patience import RECENT, Patience
from shakedown.report.series import as_number
from shakedown.report.view import AttemptView, LogFile, Unreadable

# A run's files are small; a larger one is not a verdict, and reading it could fill the memory.
MAX_BYTES = 32 << 20
MAX_CONFIG_BYTES = 1 << 20
# A JSON number may be any integer; steps and counts beyond this are damage.
MAX_WHOLE = 1 << 53
LONGEST = 1e9  # seconds of a step, or left: beyond is damage


@dataclass
class RunReader:
    """A reader of files below `root` that lists broken ones in `unreadable`."""

    root: Path
    unreadable: list[Unreadable] = field(default_factory=list)

    def verdict(self, path: Path) -> Verdict | None:
        """A verdict file; None if it is missing or damaged."""
        if not self._usable(path):
            return None
        try:
            return read_verdict(path)
        except UsageError as error:
            self._refuse(path, error)
            return None

    def mapping(self, path: Path) -> Mapping[str, Any] | None:
        """A JSON object; None if missing."""
        if not self._usable(path):
            return None
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self._refuse(path, error)
            return None
        if not isinstance(body, dict):
            self._refuse(path, TypeError("expected a JSON object"))
            return None
        return body

    def config(self, path: Path) -> tuple[str, Mapping[str, Any]]:
        """The resolved config as text and as a mapping (empty if unreadable)."""
        text = self.text(path, limit=MAX_CONFIG_BYTES)
        if not text:
            return "", {}
        try:
            return text, read_yaml(path)
        except ConfigError as error:
            self._refuse(path, error)
            return text, {}

    def text(self, path: Path, *, limit: int = MAX_BYTES) -> str:
        """A text file; empty if missing."""
        if not self._usable(path, limit=limit):
            return ""
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(path, error)
            return ""

    def rows(self, path: Path) -> Iterator[JsonRow]:
        """The rows of a stage's file, each with its step; other lines are reported as damage."""
        if not self._usable(path, limit=None):
            return
        lines = step_rows(path)
        try:
            yield from lines
        except OSError as error:
            self._refuse(path, error)
        if lines.damage:
            self._refuse(path, ValueError(lines.damage))

    def attempts(self, paths: StagePaths) -> list[AttemptView]:
        """The attempts on disk, ascending; if their folders are gone, the stage's outcome."""
        try:
            found = paths.attempt_numbers()
        except (OSError, ValueError) as error:
            self._refuse(paths.attempts, error)
            return []
        if found:
            return [self._attempt(number, paths.attempt(number)) for number in found]
        outcome = self._outcome(paths.outcome, 1)
        return [AttemptView(outcome.attempt, paths.root, outcome)] if outcome else []

    def _attempt(self, number: int, paths: AttemptPaths) -> AttemptView:
        outcome = self._outcome(paths.outcome, number)
        return AttemptView(number, paths.root, outcome, self.logs(paths.logs))

    def logs(self, folder: Path) -> list[LogFile]:
        """The `*.log` files of a folder with their sizes."""
        found = [path for path in self._listing(folder) if path.suffix == ".log"]
        return [LogFile(path, size) for path in found for size, _ in self._stat(path)]

    def folders(self, folder: Path) -> list[Path]:
        """The folders in a folder, by name."""
        return [path for path in self._listing(folder) if path.is_dir()]

    def newest_change(self, paths: StagePaths, attempt: AttemptView | None) -> float | None:
        """The time of the newest attempt's last write, in seconds since 1970."""
        if attempt is None:
            return None
        own = AttemptPaths(attempt.root)
        files = [paths.metrics, *self._listing(own.heartbeats), *self._listing(own.logs)]
        return max((changed for file in files for _, changed in self._stat(file)), default=None)

    def _stat(self, path: Path) -> list[tuple[int, float]]:
        """Size and time of the last change; empty if it is gone or not a regular file."""
        try:
            facts = path.stat()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._refuse(path, error)
            return []
        return [(facts.st_size, facts.st_mtime)] if stat.S_ISREG(facts.st_mode) else []

    def _outcome(self, path: Path, number: int) -> Outcome | None:
        if self._usable(path):
            try:
                return read_outcome(path)
            except UsageError as error:
                self._refuse(path, error)
        return Outcome("", number, "unreadable", "") if path.is_file() else None

    def _listing(self, folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._refuse(folder, error)
            return []

    def _usable(self, path: Path, *, limit: int | None = MAX_BYTES) -> bool:
        """Whether it is a regular file of sensible size; a missing one is not a fault."""
        try:
            if not path.is_file():
                if path.exists():
                    self._refuse(path, TypeError("not a regular file"))
                return False
            size = path.stat().st_size
        except OSError as error:
            self._refuse(path, error)
            return False
        if limit is not None and size > limit:
            self._refuse(path, ValueError(f"{size} bytes, more than {limit}"))
            return False
        return True

    def _refuse(self, path: Path, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        where = path.relative_to(self.root).as_posix()
        reason = reason.replace(str(path), path.name).replace("\n", " ")
        self.unreadable.append(Unreadable(where, reason[:300]))


def mapping_of(value: object) -> Mapping[Any, Any]:
    """The mapping, or an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def finite(value: object) -> float | None:
    """The finite float, or None for anything else."""
    found = as_number(value)
    return found if math.isfinite(found) else None


def patience_of(config: object) -> Patience:
    """Of a stage's watch, by the stage's config; the defaults for what that does not tell."""
    told = mapping_of(config)
    return Patience(
        step=finite(told.get("stall_timeout")) or Patience.step,
        phase=finite(told.get("start_timeout")) or Patience.phase,
    )


def longest_step(rows: Iterable[Mapping[str, object]]) -> float:
    """Of the last rows, as the watch learns it: without waits for rollouts, and without the first
    step, which holds the start. 0 where no row tells.
    """
    last = [r for r in rows if (finite(r.get("step")) or 0) > 1][-RECENT:]
    own = [
        (finite(r.get("step_seconds")) or 0) - (finite(r.get("wait_seconds")) or 0) for r in last
    ]
    return max((seconds for seconds in own if 0 < seconds < LONGEST), default=0.0)


def whole(value: object) -> int | None:
    """A whole number of sensible size, or None."""
    number = finite(value)
    if number is None or abs(number) > MAX_WHOLE or number != int(number):
        return None
    return int(number)


def string(value: object) -> str:
    """The value as text; None is empty."""
    return "" if value is None else str(value)
