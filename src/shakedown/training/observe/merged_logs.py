"""All logs of an attempt as one, by time, with each line's component: bounded, read as it is."""

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from shakedown.errors import UsageError, did_you_mean
from shakedown.paths import AttemptPaths
from shakedown.reports.text import printable
from shakedown.training.observe.log_times import Clock, Log, find_logs, read_clocks

MAX_CHARS = 2000  # of a line that are shown
_MAX_BYTES = 4 * MAX_CHARS  # of a line that are kept
_BLOCK = 1 << 16
_FOLLOW_BYTES = 1 << 20  # of a log and look
_TAIL_BYTES = 64 << 20  # looked through for the last lines of a log
# Colours and cursor moves of programs that take a log for a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True, order=True)
class Line:
    """`time` in Unix seconds, of the look that found the line; None where nobody looked."""

    order: tuple[float, int]
    component: str
    text: str
    time: float | None


def find(attempt: AttemptPaths, patterns: Sequence[str] = ()) -> dict[str, Log]:
    """The logs of an attempt, `rank2` before `rank10`.

    Args:
        patterns: names or shell patterns such as `trainer-*`; none: all logs.

    Raises:
        UsageError: a pattern fits none, or the folder cannot be read.
    """
    try:
        found = find_logs(attempt.logs)
    except OSError as error:
        raise UsageError(f"cannot read {attempt.logs}: {error.strerror}") from error
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            known = ", ".join(sorted(found, key=_natural)) or "none yet"
            guess = did_you_mean(pattern, found)
            raise UsageError(f"no log of a component {pattern!r}{guess}; there are: {known}")
    wanted = {
        name: log
        for name, log in found.items()
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    return {name: wanted[name] for name in sorted(wanted, key=_natural)}


def merge(
    attempt: AttemptPaths, logs: Mapping[str, Log], tail: int | None = None
) -> Iterator[Line]:
    """The lines of these logs up to the size at which they were found, by time.

    Lines of one time stand by component. A log that nobody looked at comes last, whole.

    Args:
        tail: the last lines alone.
    """
    clocks = read_clocks(attempt.log_times)
    parts = (
        _lines(name, log, clocks.get(name, Clock()), place, tail)
        for place, (name, log) in enumerate(logs.items())
    )
    merged = heapq.merge(*parts, key=lambda line: line.order)
    return merged if tail is None else iter(deque(merged, maxlen=tail))


def whole_lines(logs: Mapping[str, Log]) -> dict[str, Log]:
    """The logs up to their last end of line: what comes after it is still being written."""
    cut = {}
    for name, log in logs.items():
        begin = max(0, log.size - _BLOCK)
        with _opened(log.path) as stream:
            stream.seek(begin)
            end = stream.read(log.size - begin).rfind(b"\n") + 1
        cut[name] = replace(log, size=begin + end) if end or not begin else log
    return cut


class Follower:
    """What is added to the logs after the `sizes` at which `merge` ended, and in new logs."""

    def __init__(
        self, attempt: AttemptPaths, patterns: Sequence[str], sizes: Mapping[str, int]
    ) -> None:
        self._attempt, self._patterns = attempt, tuple(patterns)
        self._offsets = dict(sizes)

    def poll(self, now: float, *, last: bool = False) -> list[Line]:
        """New whole lines, by component.

        Args:
            now: Unix seconds: the time of the lines.
            last: what has no end of line is a line too.
        """
        lines = []
        logs = find(self._attempt)
        wanted = [name for name in logs if self._wanted(name)]
        for place, name in enumerate(wanted):
            for raw, cut in self._new(name, logs[name], last):
                lines.append(Line((now, place), name, clean(raw, cut), now))
        return lines

    def _wanted(self, name: str) -> bool:
        return not self._patterns or any(fnmatchcase(name, p) for p in self._patterns)

    def _new(self, name: str, log: Log, last: bool) -> Iterable[tuple[bytes, int]]:
        begin = self._offsets.get(name, 0)
        begin = 0 if log.size < begin else begin  # written anew
        with _opened(log.path) as stream:
            stream.seek(begin)
            chunk = stream.read(min(log.size - begin, _FOLLOW_BYTES))
        end = chunk.rfind(b"\n") + 1
        if last or (not end and len(chunk) >= _BLOCK):
            end = len(chunk)
        self._offsets[name] = begin + end
        lines = chunk[:end].removesuffix(b"\n").split(b"\n") if end else []
        for raw in lines:
            yield raw[:_MAX_BYTES], max(0, len(raw) - _MAX_BYTES)


def clean(raw: bytes, cut: int = 0) -> str:
    """A line as text that a terminal may see: one line, printable, bounded.

    Of a progress bar that a program drew again and again on one line the last state stays.

    Args:
        cut: bytes that were left out after `raw`.
    """
    states = raw.decode("utf-8", "replace").split("\r")
    text = _ESCAPES.sub("", next((s for s in reversed(states) if s.strip()), ""))
    text = printable(text.replace("\t", "    ").replace("\n", " "))
    left = len(text) - MAX_CHARS
    if left > 0 or cut:
        return f"{text[:MAX_CHARS]} ... {max(left, 0) + cut} more"
    return text.rstrip()


def _lines(name: str, log: Log, clock: Clock, place: int, tail: int | None) -> Iterator[Line]:
    with _opened(log.path) as stream:
        begin = 0 if tail is None else _tail_start(stream, log.size, tail)
        for end, raw, cut in _raw_lines(stream, begin, log.size):
            moment = clock.at(end, log.changed)
            order = (float("inf") if moment is None else moment, place)
            yield Line(order, name, clean(raw, cut), moment)


def _raw_lines(stream: IO[bytes], begin: int, size: int) -> Iterator[tuple[int, bytes, int]]:
    """(end, bytes without the end of line, bytes left out) of each line; memory is bounded."""
    stream.seek(begin)
    place = begin
    while place < size:
        raw = stream.readline(min(_MAX_BYTES, size - place))
        place += len(raw)
        cut, end = 0, raw[-1:]
        while end != b"\n" and place < size:
            more = stream.readline(min(_BLOCK, size - place))
            if not more:
                break
            place, cut, end = place + len(more), cut + len(more), more[-1:]
        if not raw:
            return
        yield place, raw.removesuffix(b"\n"), cut - (1 if cut and end == b"\n" else 0)


def _tail_start(stream: IO[bytes], size: int, lines: int) -> int:
    """Where the last `lines` lines begin; looks back a bounded way."""
    place, left = size, lines + 1  # the last line's own end counts too
    while place > 0 and size - place < _TAIL_BYTES:
        begin = max(0, place - _BLOCK)
        stream.seek(begin)
        block = stream.read(place - begin)
        if place == size and not block.endswith(b"\n"):
            left -= 1
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if not left:
                return begin + at + 1
        place = begin
    return place


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d{1,18})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
