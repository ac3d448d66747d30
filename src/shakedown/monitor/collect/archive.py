"""A folder of evidence as a tar archive on a stream: from a host that shares no folder with us.

Another host's archive is hostile input: only plain files are taken, each written whole below the
intended folder, within limits of size and number.
"""

import io
import tarfile
from pathlib import Path
from typing import IO

from shakedown.monitor.collect.writer import Writer

MAX_FILE = 64 * 2**20  # as large as the largest file that is read of evidence
MAX_BYTES = 512 * 2**20  # of a host
MAX_FILES = 20_000
_MAX_FOLDERS = 12


def pack(folder: Path, stream: IO[bytes]) -> None:
    """Write every file below `folder`; names and content, no owners, modes or links.

    The table that names the others comes last: whoever has it has them all.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    paths.sort(key=lambda path: path.match("collected-*.json"))
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in paths:
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            body = path.read_bytes()
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))


def unpack(stream: IO[bytes], writer: Writer) -> None:
    """Write the files of an archive by `writer`, which notes what cannot be written.

    Raises:
        OSError, ValueError, tarfile.TarError: no archive, one that breaks off, or one beyond the
            limits; what came before is written.
    """
    bounded, refused = _Bounded(stream), 0
    with tarfile.open(fileobj=bounded, mode="r|") as archive:  # type: ignore[call-overload]
        for number, member in enumerate(archive):
            if number >= MAX_FILES:
                raise ValueError(f"more than {MAX_FILES} files")
            file = archive.extractfile(member) if _is_plain(member) else None
            if file is not None:
                writer.data(member.name, file.read())
            refused += file is None
    if refused:
        writer.missed.append(f"{refused} entries of its archive not taken: no plain file, or large")


def _is_plain(member: tarfile.TarInfo) -> bool:
    """A regular file of a bearable size whose name cannot lead out of its folder."""
    folders = member.name.split("/")
    inside = len(folders) <= _MAX_FOLDERS and not {"", ".", ".."} & set(folders)
    # A sparse file is as large as it says, whatever was sent.
    whole = member.isreg() and not member.issparse() and member.size <= MAX_FILE
    return inside and whole and "\0" not in member.name


class _Bounded:
    """The stream's first `MAX_BYTES`: headers of an archive can be as large as files."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = MAX_BYTES

    def read(self, size: int) -> bytes:
        body = self._stream.read(size)
        self._left -= len(body)
        if self._left < 0:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return body
