"""The ends of logs: what was printed last."""

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from shakedown.monitor.collect.writer import NAMES, Writer, printable

LOG_BYTES = 256 * 1024  # of each log
MAX_LOGS = 4096
# A number that ends a file's name is read as a rank; that of `slurm-1234.out` is a job.
_NUMBERED, _LETTERS = re.compile(r"(slurm-[0-9_]+)(\.[a-z]+)"), r"\1-output\2"
_SUFFIXES = (".log", ".out", ".err")


def logs_in(folder: Path) -> list[Path]:
    """The logs directly in `folder`, by name.

    Raises:
        OSError: the folder cannot be listed.
    """
    with os.scandir(folder) as entries:
        return sorted(folder / e.name for e in entries if e.name.endswith(_SUFFIXES))


def copy_ends(paths: Iterable[Path], writer: Writer) -> None:
    """Copy the last 256 KiB of each to `logs/NAME`; one that cannot be read is noted."""
    for number, path in enumerate(paths):
        if number == MAX_LOGS:
            writer.missed.append(f"logs after the first {MAX_LOGS} were not copied")
            return
        try:
            writer.data(NAMES.logs / _NUMBERED.sub(_LETTERS, path.name), _end_of(path))
        except OSError as error:
            writer.missed.append(printable(f"log {path.name}: {error.strerror or error}"))


def _end_of(path: Path) -> bytes:
    """Opening a pipe would wait for its writer, and a device has no end: files alone are read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        stream.seek(max(0, status.st_size - LOG_BYTES))
        return stream.read(LOG_BYTES)
