"""The logs of an attempt: found by component, followed as they grow, fit for a terminal."""

import contextlib
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from shakedown.core.errors import UsageError, did_you_mean
from shakedown.core.paths import AttemptPaths, RunPaths, StagePaths
from shakedown.core.visible import is_visible, masked

MAX_CHARS = 2000  # of a line that are shown
_BLOCK = 1 << 20  # of a log and look
_SUFFIX = ".log"
# Colours and cursor moves of programs that take a log for a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def find_stage(paths: RunPaths, wanted: str | None) -> StagePaths:
    """The stage that was asked for, else the one whose newest attempt is the newest of all.

    Raises:
        UsageError: no such run or stage, or none has begun.
    """
    if not paths.root.is_dir():
        raise UsageError(
            f"{paths.root} is not a folder: expected a run's results, such as results/demo"
        )
    folders = sorted(paths.stages.iterdir()) if paths.stages.is_dir() else []
    begun = {f.name: paths.stage(f.name) for f in folders if paths.stage(f.name).attempt_numbers()}
    if wanted is not None and wanted not in begun:
        known = ", ".join(begun) or "none"
        raise UsageError(
            f"{paths.root} has no attempt of a stage {wanted!r}{did_you_mean(wanted, begun)}; "
            f"begun: {known}"
        )
    if not begun:
        raise UsageError(f"{paths.root}: no training stage has begun", hint="shakedown status RUN")
    return begun[wanted] if wanted is not None else max(begun.values(), key=_begun)


def _begun(stage: StagePaths) -> float:
    try:
        return stage.attempt(stage.attempt_numbers()[-1]).root.stat().st_mtime
    except OSError:  # a folder that is no attempt of ours, such as `7`
        return 0.0


def find_attempt(stage: StagePaths, wanted: int | None) -> AttemptPaths:
    """The attempt that was asked for, else the newest.

    Raises:
        UsageError: the stage has no such attempt.
    """
    numbers = stage.attempt_numbers()
    if wanted is not None and wanted not in numbers:
        known = ", ".join(map(str, numbers))
        raise UsageError(f"stage {stage.root.name} has no attempt {wanted}; it has: {known}")
    return stage.attempt(wanted or numbers[-1])


def find_logs(attempt: AttemptPaths, patterns: Sequence[str] = ()) -> dict[str, Path]:
    """The regular `*.log` files of an attempt by component, `rank2` before `rank10`.

    Args:
        patterns: names or shell patterns such as `trainer-*`; none: all logs.

    Raises:
        UsageError: a pattern fits none, or the folder cannot be read.
    """
    try:
        paths = [path for path in attempt.logs.iterdir() if path.suffix == _SUFFIX]
    except FileNotFoundError:
        paths = []
    except OSError as error:
        raise UsageError(f"cannot read {attempt.logs}: {error.strerror}") from error
    found = {path.stem: path for path in paths if _is_regular(path)}
    names = sorted(found, key=_natural)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names) or "none yet"
            guess = did_you_mean(pattern, names)
            raise UsageError(f"no log of a component {pattern!r}{guess}; there are: {known}")
    wanted = [n for n in names if not patterns or any(fnmatchcase(n, p) for p in patterns)]
    return {name: found[name] for name in wanted}


class LogFollower:
    """New whole lines of logs, from the begin of each on or from its last lines."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def skip_to_tail(self, path: Path, lines: int) -> None:
        """Begin with the last `lines` lines of what is there, of its last MiB at most."""
        with contextlib.suppress(OSError), path.open("rb") as stream:
            size = stream.seek(0, 2)
            begin = stream.seek(max(0, size - _BLOCK))
            block = stream.read(_BLOCK)
            kept = b"\n".join(block.removesuffix(b"\n").split(b"\n")[-lines:])
            self._offsets[path] = begin + len(block) - len(kept) - block.endswith(b"\n")

    def new_lines(self, path: Path, *, last: bool = False) -> list[str]:
        """What was added, at most a MiB; a line that is being written is left for later.

        A log that shrank was written anew. A log that is gone or cannot be read has no lines.

        Args:
            last: what has no end of line is a line too.
        """
        try:
            with path.open("rb") as stream:
                begin = self._offsets.get(path, 0)
                stream.seek(begin if begin <= path.stat().st_size else 0)
                begin = stream.tell()
                chunk = stream.read(_BLOCK)
        except OSError:
            return []
        end = chunk.rfind(b"\n") + 1
        at_end = len(chunk) < _BLOCK
        if (last and at_end) or not (end or at_end):
            end = len(chunk)
        self._offsets[path] = begin + end
        return _clean_all(chunk[:end].removesuffix(b"\n")) if end else []


def merged(
    follower: LogFollower, logs: Mapping[str, Path], *, last: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """What was added to each log, (component, lines), log by log."""
    for name, path in logs.items():
        while lines := follower.new_lines(path, last=last):
            yield name, lines


def _clean_all(block: bytes) -> list[str]:
    text = block.decode("utf-8", "replace")
    # Most logs have nothing to clean: to look once at a MiB takes a tenth of looking at its lines.
    if is_visible(text) and "\t" not in text:
        return [_bounded(line) for line in text.split("\n")]
    return [clean(raw) for raw in block.split(b"\n")]


def clean(raw: bytes) -> str:
    """A line as text that a terminal may see: one line, printable, bounded.

    Of a progress bar that a program drew again and again on one line the last state stays.
    """
    states = raw.decode("utf-8", "replace").split("\r")
    text = _ESCAPES.sub("", next((s for s in reversed(states) if s.strip()), ""))
    return _bounded(masked(text.replace("\t", "    ").replace("\n", " ")))


def _bounded(text: str) -> str:
    left = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} ... {left} more" if left > 0 else text.rstrip()


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:  # gone meanwhile, or a link to nothing
        return False


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d{1,18})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
