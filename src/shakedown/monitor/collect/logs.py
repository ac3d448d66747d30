"""The ends of logs and of processes' output."""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from shakedown.monitor.collect.proc import link
from shakedown.monitor.collect.writer import NAMES, Writer, printable

LOG_BYTES = 256 * 1024  # of each log
MAX_LOGS = 4096
# A number that ends a file's name is read as a rank; that of `slurm-1234.out` is a job.
_NUMBERED, _LETTERS = re.compile(r"(slurm-[0-9_]+)(\.[a-z]+)"), r"\1-output\2"
_SUFFIXES = (".log", ".out", ".err")
_LEVELS = 4  # of folders below the given one


def logs_in(folder: Path) -> list[Path]:
    """The logs in `folder` and, as torchrun's --log-dir lays them out, some levels below, by name.

    Raises:
        OSError: the folder cannot be listed.
    """
    found: list[Path] = []
    left = [(folder, 0)]
    while left and len(found) <= MAX_LOGS:
        place, depth = left.pop()
        with os.scandir(place) as entries:
            rows = sorted(entries, key=lambda entry: entry.name)
        found += [place / e.name for e in rows if e.name.endswith(_SUFFIXES) and not _is_folder(e)]
        # RUN_ID/attempt_0/3/stderr.log
        below = [(place / e.name, depth + 1) for e in reversed(rows) if _is_folder(e)]
        left += below if depth < _LEVELS else []
    return found


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir(follow_symlinks=False)


def copy_ends(
    paths: Iterable[Path],
    writer: Writer,
    folder: Path | None = None,
    below: Path = Path(),
    *,
    follow: bool = True,
) -> None:
    """Copy the last 256 KiB of each to `logs/NAME`, with its folders below `folder`; one that
    cannot be read is noted.

    Args:
        below: a folder in `logs` for them.
        follow: links, which lead out of a container.
    """
    for number, path in enumerate(paths):
        if number == MAX_LOGS:
            writer.missed.append(f"logs after the first {MAX_LOGS} were not copied")
            return
        name = path.relative_to(folder) if folder is not None else Path(path.name)
        try:
            end = _end_of(path, follow=follow)
        except OSError as error:
            writer.missed.append(printable(f"log {path.name}: {error.strerror or error}"))
            continue
        writer.data(NAMES.logs / below / name.parent / _NUMBERED.sub(_LETTERS, name.name), end)


def copy_output(processes: Mapping[int, str], writer: Writer) -> int:
    """Copy the ends of the files that processes print to: `logs/NAME.out` and `logs/NAME.err`.

    A file that several print to is nobody's own: `logs/output.log`, the next `logs/output1.log`.
    Returns how many files there are.
    """
    printed: dict[tuple[int, int] | str, list[tuple[int, int]]] = {}
    for pid in processes:
        for number in (1, 2):
            if key := _file_of(pid, number):
                printed.setdefault(key, []).append((pid, number))
    shared = 0
    for users in list(printed.values())[:MAX_LOGS]:
        pid, number = users[0]
        name = f"{processes[pid]}.{'out' if number == 1 else 'err'}"
        if len({pid for pid, _ in users}) > 1:
            name, shared = f"output{shared or ''}.log", shared + 1
        try:
            # By the process's own descriptor: the path may be another file in its container.
            end = _end_of(Path(f"/proc/{pid}/fd/{number}"))
            if end:
                writer.data(NAMES.logs / name, end)
        except OSError as error:
            target = link(f"/proc/{pid}/fd/{number}")
            writer.missed.append(printable(f"output {target}: {error.strerror or error}"))
    return len(printed)


def _file_of(pid: int, number: int) -> tuple[int, int] | str:
    """The identity of a descriptor's file, whose path may name another file in a container. Empty
    for a pipe, socket or terminal: those have no end to be read.
    """
    place = Path(f"/proc/{pid}/fd/{number}")
    target = link(str(place))
    if not target.startswith("/") or target.startswith(("/dev/", "/proc/")):
        return ""
    try:
        status = place.stat()
    except OSError:
        return target
    return status.st_dev, status.st_ino


def _end_of(path: Path, *, follow: bool = True) -> bytes:
    """The end of a regular file alone: opening a pipe would wait, and a device has no end."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        stream.seek(max(0, status.st_size - LOG_BYTES))
        return stream.read(LOG_BYTES)
