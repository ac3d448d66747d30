"""A project folder that a group can write, and what must not be changed from there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can write, behind folders that he can enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    folder = Path(tempfile.mkdtemp(prefix="project", dir="/tmp"))  # pytest's own is closed
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def profile(shared: Path) -> Iterator[Path]:
    """A file of this user's outside of it, written long ago."""
    path = shared.with_suffix(".profile")
    path.write_text("precious")
    os.utime(path, (1, 1))
    yield path
    path.unlink()
