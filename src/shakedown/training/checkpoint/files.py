"""The files of a checkpoint: what each must hold, and which of them a disk has changed since."""

import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

_CHUNK = 4 << 20  # bytes read at a time
_BEAT_SECONDS = 0.5
_READERS = 8  # zlib lets other threads run: a fast file system is asked for several files at once


class Written(NamedTuple):
    """A file as its writer left it: bytes, and CRC-32 of them."""

    size: int
    crc: int


def checksum(path: Path) -> int:
    """CRC-32 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    found = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def damaged(folder: Path, sums: Mapping[str, int], *, beat: Callable[[], None]) -> str:
    """Read the files and compare; what is wrong with the first by name, or an empty text.

    torch.load and safetensors read a tensor with a changed bit without a word.

    Args:
        sums: CRC-32 by relative name.
        beat: called twice a second meanwhile.
    """
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        reads = {name: pool.submit(_fault, folder / name, crc) for name, crc in sums.items()}
        open_ = set(reads.values())
        while open_:
            _, open_ = wait(open_, timeout=_BEAT_SECONDS)
            beat()
    faults = (f"{name} {read.result()}" for name, read in sorted(reads.items()) if read.result())
    return next(faults, "")


def _fault(path: Path, crc: int) -> str:
    try:
        return "" if checksum(path) == crc else "is not as it was written (checksum)"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
