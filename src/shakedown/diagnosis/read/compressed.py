"""gz as it arrives: whole, cut off, of several members, or made to fill the memory."""

import zlib
from collections.abc import Iterator
from typing import IO

MAGIC = b"\x1f\x8b"
MAX_EXPANDED = 256 * 2**20  # bytes taken from one file: below a second of work
MAX_MEMBERS = 10_000  # an empty member is 20 bytes and costs as much as a full one
_CHUNK = 2**16

# What others pack evidence with; unpacking archives is left to their own tools.
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


def packed_with(head: bytes) -> str:
    """The packer of a file that begins with `head`; empty when it is none that we know."""
    named = (name for magic, name in _PACKED.items() if head.startswith(magic))
    return "a tar archive" if head[257:262] == b"ustar" else next(named, "")


def expand(head: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    """The content of a gz file in pieces of at most 64 KiB; `head` was read from it before.

    What comes before a damaged or missing end is given. It stops after `MAX_EXPANDED` bytes.

    Raises:
        ValueError: damaged before the first byte of content.
    """
    pending, given, members = head, 0, 1
    # wbits 31: a gzip header, and the largest window (zlib's manual: 16 + 15).
    engine = zlib.decompressobj(wbits=31)
    while given < MAX_EXPANDED:
        pending = pending or stream.read(_CHUNK) or b""
        if not pending:
            return
        try:
            # The second _CHUNK bounds the output: 64 KiB of gz can hold 64 MiB of zeros.
            piece = engine.decompress(pending[:_CHUNK], _CHUNK)
        except zlib.error as error:
            if given:
                return
            raise ValueError(f"damaged gz: {error}") from error
        # Behind the end of a member stands the next one: logs are appended to as gz, too.
        left = engine.unused_data if engine.eof else engine.unconsumed_tail
        pending = left + pending[_CHUNK:]
        given += len(piece)
        if piece:
            yield piece
        if engine.eof:
            pending = pending.lstrip(b"\0")  # tapes and block devices pad
            members += 1
            if members > MAX_MEMBERS:
                return
            engine = zlib.decompressobj(wbits=31)
