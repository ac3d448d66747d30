"""Jobs' logs for a terminal: the end of a failed one, and what running ones write meanwhile."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# What is read of one log at a time; a log that grows faster is shown in part.
_AT_ONCE = 64 * 1024
# Characters of a line that a failure's message shows.
_WIDEST = 2000


def last_lines(path: Path, count: int) -> list[str]:
    """The log's last lines; none when it cannot be read: Slurm may not have made it."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _AT_ONCE))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [_cut(printable(line)) for line in text.splitlines()[-count:]] if count else []


def _cut(line: str) -> str:
    return line if len(line) <= _WIDEST else f"{line[:_WIDEST]} [...]"


def printable(line: str) -> str:
    """The line without control characters: a log must not steer the reader's terminal."""
    return "".join(sign if sign.isprintable() or sign == "\t" else "�" for sign in line)


@dataclass
class _Followed:
    label: str
    path: Path
    position: int
    rest: bytes = b""


class Follower:
    """Prints new lines of running jobs' logs, each with its job in front."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._jobs: dict[str, _Followed] = {}

    def add(self, key: str, label: str, path: Path, *, from_end: bool) -> None:
        """Follow `path`; `from_end` leaves out what an earlier run has shown already."""
        size = path.stat().st_size if from_end and path.exists() else 0
        self._jobs[key] = _Followed(label, path, size)

    def poll(self) -> None:
        """Print what is new in every log."""
        for job in list(self._jobs.values()):  # the outbox's thread adds to it meanwhile
            self._read(job)
        self._stream.flush()

    def remove(self, key: str) -> None:
        """Print the rest of a job's log and follow it no longer."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        self._read(job)
        if job.rest:
            self._print(job, job.rest)
        self._stream.flush()

    def _read(self, job: _Followed) -> None:
        try:
            with job.path.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                if size < job.position:  # begun anew
                    job.position, job.rest = 0, b""
                skipped = size - job.position - _AT_ONCE
                if skipped > 0:
                    job.position += skipped
                    job.rest = b""
                    self._print(job, f"[... {skipped} bytes]".encode())
                stream.seek(job.position)
                text = stream.read(_AT_ONCE)
                job.position = stream.tell()
        except OSError:  # not there yet, or not to be seen at this moment
            return
        *lines, job.rest = (job.rest + text).split(b"\n")
        if len(job.rest) > _AT_ONCE:  # a line without an end
            lines, job.rest = [*lines, job.rest], b""
        for line in lines:
            self._print(job, line)

    def _print(self, job: _Followed, line: bytes) -> None:
        text = printable(line.decode("utf-8", errors="replace").rstrip("\r"))
        print(f"[{job.label}] {text}", file=self._stream)
