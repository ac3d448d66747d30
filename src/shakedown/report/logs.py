"""Logs made safe for a terminal: whole lines, bounded, followed as they grow."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from shakedown.core.visible import is_visible, masked

MAX_CHARS = 2000  # characters shown of a line
_BLOCK = 1 << 20  # bytes per log and look
# Colours and cursor moves of programs that mistake a log for a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class LogFollower:
    """A reader of new whole lines of logs, from the start of each or from its last lines."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def skip_to_tail(self, path: Path, lines: int) -> None:
        """Start with the last `lines` lines, from at most the last MiB."""
        with contextlib.suppress(OSError), path.open("rb") as stream:
            size = stream.seek(0, 2)
            begin = stream.seek(max(0, size - _BLOCK))
            block = stream.read(_BLOCK)
            kept = b"\n".join(block.removesuffix(b"\n").split(b"\n")[-lines:])
            self._offsets[path] = begin + len(block) - len(kept) - block.endswith(b"\n")

    def new_lines(self, path: Path, *, last: bool = False) -> list[str]:
        """The added lines, at most a MiB; an unfinished line is left for later.

        A log that shrank was rewritten. A missing or unreadable log has no lines.

        Args:
            last: text without a line end also counts as a line.
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
    """The lines added to each log, as (component, lines), log by log."""
    for name, path in logs.items():
        while lines := follower.new_lines(path, last=last):
            yield name, lines


def _clean_all(block: bytes) -> list[str]:
    text = block.decode("utf-8", "replace")
    # Most logs have nothing to clean: checking a whole MiB takes a tenth of checking its lines.
    if is_visible(text) and "\t" not in text:
        return [_bounded(line) for line in text.split("\n")]
    return [clean(raw) for raw in block.split(b"\n")]


def clean(raw: bytes) -> str:
    """A line made safe for a terminal: one line, printable, bounded.

    Only the last state of a progress bar that was redrawn on one line is kept.
    """
    states = raw.decode("utf-8", "replace").split("\r")
    text = _ESCAPES.sub("", next((s for s in reversed(states) if s.strip()), ""))
    return _bounded(masked(text.replace("\t", "    ").replace("\n", " ")))


def _bounded(text: str) -> str:
    left = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} ... {left} more" if left > 0 else text.rstrip()


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts `rank2` before `rank10`."""
    parts = re.split(r"(\d{1,18})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
