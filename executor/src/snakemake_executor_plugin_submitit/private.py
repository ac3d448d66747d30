"""Control files, which say what a job runs or how it ended, and are trusted only if nobody else
could have written them.

Such a file and its folder belong to this user or root, and neither group nor others may write to
them. In a folder that several users share, anybody may put a run's folder beside ours.
"""

import os
import shlex
import stat
import tempfile
from pathlib import Path
from typing import IO


class UntrustedFileError(RuntimeError):
    """Another user could have written it; the message says which file and what to do."""


def create(path: Path) -> IO[str]:
    """A new file for this user alone, whatever the umask; a link or file of that name is replaced.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    return os.fdopen(descriptor, "w", encoding="utf-8")


def append(path: Path) -> IO[str]:
    """Open a file to write at its end, made where it is missing.

    Raises:
        UntrustedError: another user could have written it.
        OSError: it cannot be opened.
    """
    try:
        return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")
    except FileNotFoundError:
        return create(path)


def read(path: Path, *, errors: str = "strict") -> str:
    """The whole text.

    Raises:
        UntrustedError: another user could have written it.
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    with open_to_read(path) as stream:
        return stream.read().decode(errors=errors)


def open_to_read(path: Path) -> IO[bytes]:
    """
    Raises:
        UntrustedError: another user could have written it.
        OSError: it cannot be opened.
    """
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def is_own(path: Path) -> bool:
    """Whether this user, or root, made it."""
    try:
        return _is_own(path.lstat(), path.parent)
    except OSError:  # gone meanwhile
        return False


def _open(path: Path, flags: int) -> int:
    # Looked at before it is opened: to open a FIFO would wait without end. And opened by what was
    # looked at (proc(5)), as its name may be something else's by then.
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _believe(os.fstat(folder), path.parent)
        file = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _believe(os.fstat(file), path)
        return os.open(f"/proc/self/fd/{file}", flags | os.O_CLOEXEC)
    finally:
        os.close(file)


def _believe(facts: os.stat_result, path: Path) -> None:
    is_folder = stat.S_ISDIR(facts.st_mode)
    if not is_folder and not stat.S_ISREG(facts.st_mode):
        raise UntrustedFileError(f"{path} is a link or a FIFO, which this executor does not create")
    if not _is_own(facts, path.parent):
        raise UntrustedFileError(
            f"{path} belongs to user {facts.st_uid}, who could choose what runs"
        )
    if facts.st_mode & 0o022:
        mode = stat.S_IMODE(facts.st_mode)
        raise UntrustedFileError(
            f"{path} can be written by others (mode {mode:04o}), who could choose what runs; see"
            f" that everything in it is yours, then: chmod go-w {shlex.quote(str(path))}"
        )


def _is_own(facts: os.stat_result, folder: Path) -> bool:
    if facts.st_uid in (0, os.geteuid()):
        return True
    # A file server may take root, or everybody, for another user (root_squash, all_squash).
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid == facts.st_uid
    except OSError:
        return False
