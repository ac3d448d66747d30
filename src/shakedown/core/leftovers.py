"""Temporary names that identify their process, and the removal of those left by killed processes.

No handler runs on SIGKILL, so a half-written file stays. Its name holds the machine, the process id
and the process's start time, so that the next writer can tell that nobody needs it.
"""

import contextlib
import functools
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from shakedown.processes.identity import boot_id, pid_space, started

_TAGGED = re.compile(r"\..*\.tmp-([0-9a-f]{8})-([0-9a-f]+)-([0-9a-f]+)\.[a-z0-9_]+", re.DOTALL)
# A Unix socket's path has at most 107 bytes (unix(7)). The folder's own name takes some 45 of them,
# and vLLM's sockets in it 37.
_LONGEST_PLACE = 24
_swept: set[Path] = set()


def temporary_file(path: Path) -> tuple[int, str]:
    """Open a new file beside `path` for writing, after removing the folder's leftovers.

    Raises:
        OSError: it cannot be made.
    """
    prefix = temporary_prefix(path)
    return tempfile.mkstemp(dir=path.parent, prefix=prefix)


@contextlib.contextmanager
def private_folder(name: str) -> Iterator[Path]:
    """Yield a folder for sockets and the like that only this user can enter, then remove it.

    It is in the system's temporary folder, or in /tmp if that path is too long.

    Raises:
        OSError: it cannot be made.
    """
    made = lasting_folder(name)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def lasting_folder(name: str) -> str:
    """As `private_folder`, for a process that becomes another program; the next one removes it.

    Raises:
        OSError: it cannot be made.
    """
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > _LONGEST_PLACE:
        place = "/tmp"  # noqa: S108 - mkdtemp takes a new name and gives it to this user alone
    return tempfile.mkdtemp(dir=place, prefix=temporary_prefix(Path(place, name)))


def temporary_prefix(path: Path) -> str:
    """The prefix of temporary names beside `path`; removes leftovers as above.

    The leading dot keeps unfinished files out of `*.json` and the like.
    """
    folder = path.parent.absolute()
    # Once per process and folder: a folder of many files is slow to list on a shared file system.
    if folder not in _swept:
        _swept.add(folder)
        sweep(path.parent)
    # Cut, as a name has at most 255 bytes and a character up to four.
    return f".{path.name[:50]}.{_tag(os.getpid())}."


def sweep(folder: Path) -> None:
    """Remove temporary files and folders of this user whose process on this machine is gone.

    Those of another machine, another container or an earlier boot stay, as it cannot be told from
    here whether their processes live.
    """
    # If something cannot be listed or removed it stays; the next write reports the problem.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            tagged = _TAGGED.fullmatch(entry.name)
            if tagged is None or not _orphaned(*tagged.groups()):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)


def _orphaned(machine: str, pid: str, start: str) -> bool:
    return machine == _machine() and started(int(pid, 16)) != int(start, 16)


@functools.cache
def _tag(pid: int) -> str:
    """Keyed by process id, as a forked child is another process."""
    return f"tmp-{_machine()}-{pid:x}-{started(pid):x}"


@functools.cache
def _machine() -> str:
    """This boot of this machine, and the space of its process ids (a container has its own)."""
    boot, space = boot_id(), pid_space()
    # A sandbox that hides them counts as a unique machine, so that nothing is removed.
    if not space or boot == os.uname().nodename:
        return os.urandom(4).hex()
    return f"{zlib.crc32(f'{boot}{space}'.encode()):08x}"
