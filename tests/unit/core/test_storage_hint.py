"""What is advised where a file cannot be written: space is freed only where there is none."""

import errno
import os
from pathlib import Path

import pytest

from shakedown.core.errors import StorageError, storage_hint
from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors


@pytest.mark.parametrize(
    ("number", "full"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EACCES, False),
        (errno.EROFS, False),
        (errno.ENOTDIR, False),
        (errno.ESTALE, False),
    ],
)
def test_space_is_to_be_freed_only_on_a_full_file_system(number: int, full: bool) -> None:
    error = OSError(number, os.strerror(number))

    with pytest.raises(StorageError) as raised, storage_errors("write", Path("x")):
        raise error

    assert ("free space" in raised.value.hint) == full
    assert ("free space" in storage_hint(RuntimeError(f"I/O error: {error}"))) == full


def test_a_file_below_a_file_asks_for_another_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StorageError) as raised:
        write_text(tmp_path / "file" / "x", "")

    assert raised.value.hint == "choose another results folder"
