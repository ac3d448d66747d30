"""Files of a collection: each complete or absent; failed writes are noted."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shakedown.core.errors import StorageError
from shakedown.core.files import write_json
from shakedown.core.leftovers import temporary_file
from shakedown.core.paths import EvidencePaths
from shakedown.core.private import file_mode, make_folders

# Relative, as the writer takes its files and `collected-<host>.json` names them.
NAMES = EvidencePaths(Path())

# As `diagnosis.read.evidence` reads them; its import would cost the collector half its start.
BEATS, COLLECTED = "shakedown/beats/1", "shakedown/collected/1"
READ = "read"  # what is said of a node that was; of any other it is why not


class Writer:
    """Writes below `out`. `files` are the names written, `missed` what failed, and why.

    After a full disk or a lost folder every further write fails alike: each reason is noted once.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.files: list[str] = []
        self.missed: list[str] = []
        self._reasons: dict[str, int] = {}

    def text(self, name: str | Path, text: str) -> bool:
        """Text as UTF-8; what has no form in it (names of undecodable bytes) is escaped."""
        return self.data(name, text.encode("utf-8", "backslashreplace"))

    def json(self, name: str | Path, body: Mapping[str, Any]) -> bool:
        try:
            write_json(self.out / name, body)
        except (StorageError, ValueError) as error:
            return self._failed(name, error)
        self.files.append(str(name))
        return True

    def data(self, name: str | Path, body: bytes) -> bool:
        """Write bytes, without fsync, which costs more than all the rest: files appear whole."""
        path = self.out / name
        try:
            make_folders(path.parent)
            handle, temporary = temporary_file(path)
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(body)
                os.chmod(temporary, file_mode())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            return self._failed(name, error)
        self.files.append(str(name))
        return True

    def _failed(self, name: str | Path, error: Exception) -> bool:
        """Note a failed write; a reason that affects many files, such as a full disk, once."""
        cause = error.__cause__ if isinstance(error, StorageError) else error
        reason = getattr(cause, "strerror", None) or str(error)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if self._reasons[reason] == 1:
            self.missed.append(f"cannot write {self.out / name}: {reason}")
        return False

    def summary(self) -> list[str]:
        """The list of what was missed; files with the same reason are counted together."""
        more = [f"{n} files not written: {r}" for r, n in self._reasons.items() if n > 1]
        return [printable(text) for text in [*self.missed, *more]]


def printable(text: str) -> str:
    """`text` for a terminal: names of files may hold any byte but `/` and NUL."""
    decoded = os.fsencode(text).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in decoded)
