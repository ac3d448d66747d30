"""Containers: the process ids and paths that a process inside one knows, and ours for the same.

A container has a space of its own of process ids, and mostly its own files. Its processes have ids
on the host too; their logs, heartbeats and dumps name those that they know themselves.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from shakedown.monitor.collect import proc

# The number of the first space of process ids, that of the host itself (linux/proc_ns.h).
_HOST_SPACE = "pid:[4026531836]"
_SYS_PTRACE = 19  # its bit among the capabilities (linux/capability.h)
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def contained() -> bool:
    """Whether this process is in a container: it sees the container's own processes alone."""
    return proc.link("/proc/self/ns/pid") not in ("", _HOST_SPACE)


def inner_pid(pid: int) -> int | None:
    """The process's id in its own container; None where that is the same, or not known."""
    inner = proc.status(pid, "NSpid").split()[-1:]
    return int(inner[0]) if inner and inner[0] != str(pid) else None


def may_trace() -> bool:
    """Whether this process may read the memory of others of its user, whatever they may do."""
    effective = proc.status("self", "CapEff")
    return not effective or bool(int(effective, 16) >> _SYS_PTRACE & 1)


def shares_files(pid: int) -> bool:
    """Whether paths mean the same for the process as for this one."""
    return proc.link(f"/proc/{pid}/ns/mnt") == proc.link("/proc/self/ns/mnt")


def folder_of(pid: int, file: Path, opened: Path) -> Path:
    """The folder of a file that a process has open, by a path that leads to it from here.

    The same path may be another file here.
    """
    if not shares_files(pid):
        for seen in (file, Path(f"/proc/{pid}/root{file}")):
            with contextlib.suppress(OSError):
                if seen.samefile(opened):
                    return seen.parent
    return file.parent


@contextlib.contextmanager
def folders(pids: Iterable[int], path: Path) -> Iterator[list[Path]]:
    """The folders that bear this name in the containers of `pids`, each once."""
    with contextlib.ExitStack() as stack:
        found: dict[tuple[int, int], Path] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                number = stack.enter_context(_entered(pid, path))
                status = os.fstat(number)
                found.setdefault((status.st_dev, status.st_ino), Path(f"/proc/self/fd/{number}"))
        yield list(found.values())


@contextlib.contextmanager
def _entered(pid: int, path: Path) -> Iterator[int]:
    """A descriptor of the folder. No link on the way is followed: a link in a container that names
    an absolute path would lead to the host's own file.
    """
    place = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path.parts[1:]:
            below = os.open(part, _FOLDER, dir_fd=place)
            os.close(place)
            place = below
        yield place
    finally:
        os.close(place)
