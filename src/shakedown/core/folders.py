"""Folders that appear as a whole: written to the side, then renamed."""

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shakedown.core.errors import StorageError, storage_hint
from shakedown.core.leftovers import temporary_prefix
from shakedown.core.private import make_folders


@contextlib.contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an operating-system error into a StorageError that names the action.

    Raises:
        StorageError: a full, read-only or unreadable file system, met by Python or safetensors.
    """
    try:
        yield
    # Python evaluates this only after an exception, so nothing is imported before.
    except _failures() as error:
        raise StorageError(
            f"cannot {action} {path}: {getattr(error, 'strerror', None) or error}",
            hint=storage_hint(error),
        ) from error


def remove_earlier(*results: Path) -> None:
    """Remove an earlier run's result, so that it cannot stand for this run if this one is killed.

    Raises:
        StorageError: the file system refuses.
    """
    for path in results:
        with storage_errors("remove", path):
            path.unlink(missing_ok=True)


def _failures() -> tuple[type[Exception], ...]:
    """The errors that a file system raises; the optional safetensors has its own."""
    if importlib.util.find_spec("safetensors") is None:
        return (OSError,)
    from safetensors import SafetensorError

    return (OSError, SafetensorError)


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`; on success it replaces the target.

    Raises:
        StorageError: it cannot be written.
    """
    with storage_errors("write", target):
        make_folders(target.parent)
        # Beside the target, as a rename works within one file system only.
        prefix = temporary_prefix(target)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as temporary:
            staged = Path(temporary) / target.name
            make_folders(staged)
            yield staged
            publish_folder(staged, target)


def publish_folder(staged: Path, target: Path) -> None:
    """Rename `staged` to `target` (one file system), replacing what was there.

    A reader sees the old folder, for an instant none, or the new one: never half of one.

    Raises:
        StorageError: the file system refuses.
    """
    with storage_errors("replace", target):
        sync_tree(staged)
        if not target.exists():
            staged.rename(target)
        else:
            # A rename cannot replace a folder that holds files, so the old one has to leave first.
            # Not a temporary name, which would be swept: after a kill right here this is the only
            # whole copy.
            aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
            target.rename(aside / "old")
            staged.rename(target)
            shutil.rmtree(aside)
        # Only now does the rename itself survive a crash of the host.
        sync_file(target.parent)


def sync_tree(folder: Path) -> None:
    """Flush every file below `folder` to disk, so that the rename never outruns the data."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)


def sync_file(path: Path) -> None:
    """Flush one file, or the names in one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
