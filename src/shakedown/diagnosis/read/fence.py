"""Evidence lies within what was given: a link out of it would quote a stranger's file.

Whoever can write into a folder of evidence can leave a link there, and a verdict that quotes what
it leads to is often shown to more people than may read that file.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path


class Fence:
    """The given files and folders. A link that is itself given was meant, and is followed."""

    def __init__(self, given: Iterable[Path]) -> None:
        self._roots = {os.path.realpath(path) for path in given}
        self._inside: str | None = None  # the folder that held the last file

    def link_out(self, path: Path) -> str:
        """Why a link is not followed; empty where it stays within."""
        real = os.path.realpath(path)
        return "" if self._holds(real) else _refusal(real)

    def check(self, descriptor: int, path: Path) -> None:
        """Judge an open file, as a name may have become a link since it was looked at.

        Raises:
            ValueError: it lies outside, or has a name outside and is no file for everybody.
        """
        try:
            real = os.fspath(Path(f"/proc/self/fd/{descriptor}").readlink())
        except OSError:  # no /proc in this container
            real = os.path.realpath(path)
        if not self._holds(real):
            raise ValueError(_refusal(real))
        status = os.fstat(descriptor)
        if status.st_nlink > 1 and _may_be_planted(status, Path(real).parent):
            raise ValueError(
                "a hard link in a folder that others can write, to a file that they cannot read:"
                " not read"
            )

    def _holds(self, real: str) -> bool:
        folder = real.rpartition("/")[0]
        if folder == self._inside or real in self._roots:
            return True
        at = folder
        while at not in self._roots:
            if not at:
                return "/" in self._roots
            at = at.rpartition("/")[0]
        self._inside = folder
        return True


def _refusal(real: str) -> str:
    return f"a link to {real}, outside of what was given: not followed; give that path, too"


def _may_be_planted(status: os.stat_result, folder: Path) -> bool:
    """Whether another user can have linked a file here whose content is not for them.

    A kernel with fs.protected_hardlinks lets nobody link what they cannot write; not all have it.
    """
    if status.st_mode & stat.S_IROTH:
        return False
    about = folder.stat()
    others_write = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return bool(others_write) or about.st_uid not in (0, os.geteuid())
