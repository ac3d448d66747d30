"""Files of this user alone: those that control a run, and all that a run makes.

A control file (an endpoint, a state, a stage's job, a checkpoint) decides what runs or where a run
continues. It is trusted when only this user or root could have written it: it and its folder belong
to one of them, and neither group nor others may write to them.
"""

import contextlib
import errno
import os
import pwd
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shakedown.core.errors import UntrustedError

# Set by whoever reads the config's `group_reads`, for the processes that it starts, also on nodes.
_GROUP_READS = "SHAKEDOWN_GROUP_READS"
_LARGEST_SECRET = 4096  # bytes


def restrict_umask() -> int:
    """Set the umask: nobody else can use files that this process and its children make.

    Returns:
        The umask that was set before.
    """
    return os.umask(0o027 if _group_reads() else 0o077)


def allow_group_read() -> None:
    """Set the umask: the group can read files that this process and its children make."""
    os.environ[_GROUP_READS] = "1"
    restrict_umask()


def file_mode() -> int:
    """The mode of a new file, whatever the umask and the folder's access list say."""
    return 0o640 if _group_reads() else 0o600


def make_folders(path: Path) -> None:
    """Make a folder and its parents where missing; no other user can enter new ones.

    Raises:
        OSError: it cannot be made, or is not a folder.
    """
    if not path.is_dir():
        try:
            new_folder(path)
        except FileExistsError:
            if not path.is_dir():  # otherwise another process has just made it
                raise


def new_folder(path: Path) -> None:
    """As `make_folders`, but the folder must not exist yet.

    Raises:
        OSError: FileExistsError, or it cannot be made.
    """
    make_folders(path.parent)
    path.mkdir(0o750 if _group_reads() else 0o700)
    # Files in it would follow the project folder's default access list, not the umask.
    with contextlib.suppress(OSError):  # there is none, or the file system has no such lists
        os.removexattr(path, "system.posix_acl_default")


def own_folder(path: Path) -> None:
    """Make a folder that only this user can change, or check that an existing one is.

    Raises:
        UntrustedError: others can write to it, or it is another user's.
        OSError: it cannot be made.
    """
    make_folders(path)
    check_own(path)


def check_own(path: Path) -> None:
    """Check that only this user can change a folder, if it exists.

    Raises:
        UntrustedError: others can write to it, or it is another user's.
    """
    with contextlib.suppress(FileNotFoundError):
        _believe(path.stat(), path)


def make_private_tree(root: Path) -> None:
    """Check that no other user could have changed any file or folder of a tree, if it exists.

    Raises:
        UntrustedError: names the first one that others can write to, or that belongs to another
            user.
    """
    check_own(root)
    for folder, folders, files in os.walk(root):
        for name in sorted(folders + files):
            path = Path(folder, name)
            _believe(path.lstat(), path)


def read_own(path: Path, *, errors: str = "strict") -> str:
    """The text of a control file; its folder may be reached by a link, but the file must not be
    one.

    Args:
        errors: how to treat bytes that are not UTF-8, as in `open`.

    Raises:
        UntrustedError: others could have written it.
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    with _entered(path.parent) as folder, _looked_at(path, folder) as file:
        return Path(_again(file)).read_text(encoding="utf-8", errors=errors)


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that no other user can read, even with `allow_group_read`.

    Raises:
        OSError: FileExistsError, or it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link
    with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
        stream.write(content)


def read_secret(path: Path) -> bytes:
    """Read a secret written by `write_secret`; of a file too large to be one, only the start.

    Raises:
        UntrustedError: another user could have written it or can read it.
        OSError: it cannot be read.
    """
    with _looked_at(path) as file:
        mode = stat.S_IMODE(os.fstat(file).st_mode)
        if mode & 0o077:
            raise UntrustedError(
                f"{path} is open to others than its owner (mode {mode:04o}), so it is not a secret",
                hint=_remove(path),
            )
        with Path(_again(file)).open("rb") as stream:
            return stream.read(_LARGEST_SECRET)


def open_own(path: Path, flags: int) -> int:
    """Open a file for writing (a log, a lock, a heartbeat), creating it if missing.

    No link is followed, so somebody who can write to the folder cannot make this change another of
    the user's files.

    Args:
        flags: of os.open.

    Raises:
        UntrustedError: it is a link, a FIFO, another user's file, or one with two names.
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode())
    except OSError as error:
        # EROFS is also reported for an existing file, which can still be read.
        reads = error.errno == errno.EROFS and flags & os.O_ACCMODE == os.O_RDONLY
        if error.errno != errno.EEXIST and not reads:
            raise
    with _looked_at(path) as file:
        if os.fstat(file).st_nlink > 1:
            raise UntrustedError(f"{path} is a hard link to another file", hint=_remove(path))
        return os.open(_again(file), flags | os.O_CLOEXEC)


@contextlib.contextmanager
def _entered(folder: Path) -> Iterator[int]:
    """The opened folder itself, whatever replaces it meanwhile."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _believe(os.fstat(descriptor), folder)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _looked_at(path: Path, folder: int | None = None) -> Iterator[int]:
    """A handle on a regular file that is not yet opened; `folder` is its open folder.

    Opening a FIFO would block forever, and the name may refer to something else by then.
    """
    name = path if folder is None else path.name
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise UntrustedError(
                f"{path} is a link or a FIFO, not a regular file", hint=_remove(path)
            )
        _believe(facts, path)
        yield descriptor
    finally:
        os.close(descriptor)


def _again(descriptor: int) -> str:
    """The name that opens the very file that was checked (proc(5))."""
    return f"/proc/self/fd/{descriptor}"


def _believe(facts: os.stat_result, path: Path) -> None:
    if not _is_own(facts.st_uid, path.parent):
        raise UntrustedError(
            f"{path} belongs to {_user(facts.st_uid)}, not to {_user(os.geteuid())} or root: "
            "another user could choose what runs",
            hint=f"run it as {_user(facts.st_uid)}, or choose a results folder of your own",
        )
    mode = stat.S_IMODE(facts.st_mode)
    # In a folder with the sticky bit, such as /tmp, nobody can replace another user's file.
    sticky = stat.S_ISDIR(facts.st_mode) and mode & stat.S_ISVTX
    if mode & 0o022 and not sticky and not stat.S_ISLNK(facts.st_mode):
        whom = "everybody" if mode & 0o002 else "its group"
        raise UntrustedError(
            f"{path} can be written by {whom} (mode {mode:04o}): others could choose what runs",
            hint=f"check that everything in it is yours, then: chmod go-w {shlex.quote(str(path))}",
        )


def _is_own(user: int, folder: Path) -> bool:
    if user in (0, os.geteuid()):
        return True
    # A file server may map root, or everybody, to another user (root_squash, all_squash).
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid == user
    except OSError:
        return False


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _remove(path: Path) -> str:
    return f"find out who made it, then: rm {shlex.quote(str(path))}"


def _group_reads() -> bool:
    return os.environ.get(_GROUP_READS) == "1"
