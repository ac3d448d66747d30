"""Jobs' logs: their places, the end of a failed one, and the output of running ones.

Slurm writes the logs of an array by one pattern, so all of them stand in their run's folder. A
link by rule and wildcards leads to each; a log that stays takes its link's place.
"""

import hashlib
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# Bytes read of one log at a time; a log that grows faster is shown in part.
_AT_ONCE = 64 * 1024
# Characters of a line that a failure's message shows.
_WIDEST = 2000


# File systems allow 255 bytes.
_LONGEST_NAME = 200
_LOG_NAME = re.compile(r"\d+(?:_\d+)?(?:\.[\w.-]+)?\.log")


def file_name(text: str) -> str:
    """`text` as the name of one file: no separator, nothing hidden, no control characters."""
    plain = re.sub(r"[/\x00-\x1f\x7f]|^\.", "_", text)
    raw = plain.encode()
    if len(raw) <= _LONGEST_NAME:
        return plain
    mark = hashlib.sha256(raw).hexdigest()[:8]
    return f"{raw[:_LONGEST_NAME].decode(errors='ignore')}-{mark}"


def show(log: Path, link: Path, top: Path) -> None:
    """Let `link`, below `top`, lead to a job's log, which need not be there yet."""
    _make_folders(link, top)
    link.unlink(missing_ok=True)  # of a cluster whose ids begin anew
    link.symlink_to(os.path.relpath(log, link.parent.resolve()))


def _make_folders(link: Path, top: Path) -> None:
    top.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs may hold what is nobody's business
    link.parent.mkdir(parents=True, exist_ok=True)


def keep(log: Path, link: Path, top: Path) -> None:
    """Move an ended job's log to the place of its link below `top`."""
    if log.exists():  # Slurm may not have made it
        _make_folders(link, top)
        log.replace(link)


def remove(log: Path, link: Path, top: Path) -> None:
    """Remove an ended job's log, its link, and folders below `top` that are empty then."""
    log.unlink(missing_ok=True)
    link.unlink(missing_ok=True)
    for folder in link.parents:
        if folder == top or top not in folder.parents:
            return
        try:
            folder.rmdir()
        except OSError:  # other logs are in it
            return


def remove_old(top: Path, days: float) -> None:
    """Remove logs of this executor below `top` that nobody has written for `days`."""
    oldest = time.time() - days * 24 * 3600
    # All of them first: folders that become empty go too.
    for path in [*top.glob("rule_*/**/*.log"), *top.glob("group_*/**/*.log")]:
        with suppress(FileNotFoundError):  # another run tidies up as well
            if _LOG_NAME.fullmatch(path.name) and path.lstat().st_mtime < oldest:
                remove(path, path, top)


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
    """The line without control characters, so that a log cannot steer the reader's terminal."""
    return "".join(sign if sign.isprintable() or sign == "\t" else "�" for sign in line)


@dataclass
class _Followed:
    label: str
    path: Path
    position: int
    rest: bytes = b""


class Follower:
    """A printer of new lines of running jobs' logs, each prefixed with its job.

    Args:
        single: only while there is one job: lines of several are hard to read.
    """

    def __init__(self, *, single: bool = False, stream: TextIO | None = None) -> None:
        self._single = single
        self._stream = stream or sys.stderr
        self._jobs: dict[str, _Followed] = {}

    def add(self, key: str, label: str, path: Path, *, from_end: bool) -> None:
        """Follow `path`; `from_end` leaves out what an earlier run has shown already."""
        size = path.stat().st_size if from_end and path.exists() else 0
        self._jobs[key] = _Followed(label, path, size)

    def poll(self) -> None:
        """Print the new lines of every log."""
        jobs = list(self._jobs.values())  # the outbox's thread adds to it meanwhile
        if self._single and len(jobs) != 1:
            return
        for job in jobs:
            self._read(job)
        self._stream.flush()

    def remove(self, key: str) -> None:
        """Print the rest of a job's log and stop following it."""
        is_shown = not self._single or len(self._jobs) == 1
        job = self._jobs.pop(key, None)
        if job is None or not is_shown:
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
