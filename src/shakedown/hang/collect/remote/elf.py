"""Addresses of symbols in an ELF file (elf(5)): dynamic ones alone, which a strip leaves."""

import os
from collections.abc import Mapping, Sequence
from struct import Struct, error
from typing import NamedTuple

from shakedown.hang.collect.remote.memory import Unreadable

HEAD_BYTES = 4096  # of the file and of the memory that are compared: program headers, build id
MAX_SECTIONS = 4096
MAX_TABLE_BYTES = 2**24  # a table of symbols or their names
_MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little endian, version 1
_X86_64 = 62
_DYNSYM = 11
_LOAD = 1
_FILE = Struct("<16xHH12xQQ6xHHHH")
_SEGMENT = Struct("<I4xQQ")
_SECTION = Struct("<4xI16xQQI")
_SYMBOL = Struct("<IBxHQQ")


class Image(NamedTuple):
    """A program or library: its first bytes, where it wants to be loaded, its symbols."""

    head: bytes
    wanted: int
    symbols: Mapping[str, int]


def read_image(file: int, names: Sequence[str]) -> Image:
    """Read an open file; `symbols` are those of `names` that it defines.

    Raises:
        Unreadable: it is no ELF file of this kind of machine, or a damaged one.
    """
    head = _read(file, 0, HEAD_BYTES)
    if len(head) < _FILE.size + 16 or head[: len(_MAGIC)] != _MAGIC:
        raise Unreadable("no ELF file of 64 bits")
    _, machine, segments, sections, segment_size, count, section_size, section_count = (
        _FILE.unpack_from(head)
    )
    if machine != _X86_64:
        raise Unreadable("not a program for x86-64")
    try:
        wanted = _wanted(head, segments, segment_size, count)
        symbols = _symbols(file, sections, section_size, section_count, names)
    except (error, ValueError, OverflowError) as fault:
        raise Unreadable(f"a damaged ELF file: {fault}") from fault
    return Image(head, wanted, symbols)


def _wanted(head: bytes, at: int, size: int, count: int) -> int:
    """The address of the file's first byte, before it is moved."""
    for number in range(count):
        kind, offset, address = _SEGMENT.unpack_from(head, at + number * size)
        if kind == _LOAD and offset == 0:
            return int(address)
    raise ValueError("no segment with its head")


def _symbols(file: int, at: int, size: int, count: int, names: Sequence[str]) -> dict[str, int]:
    if size < 64 or count > MAX_SECTIONS:
        raise ValueError("its sections")
    table = _read(file, at, size * count)
    places = [_SECTION.unpack_from(table, number * size) for number in range(count)]
    for kind, offset, length, link in places:
        if kind == _DYNSYM and link < count:
            texts = _read(file, *places[link][1:3])
            return _defined(_read(file, offset, length), b"\0" + texts, names)
    raise ValueError("no dynamic symbols")


def _defined(table: bytes, texts: bytes, names: Sequence[str]) -> dict[str, int]:
    wanted = {texts.find(b"\0%s\0" % name.encode()): name for name in names}
    rows = _SYMBOL.iter_unpack(table[: len(table) // _SYMBOL.size * _SYMBOL.size])
    # a symbol of section 0 is another file's
    return {
        wanted[name]: value for name, _, section, value, _ in rows if section and name in wanted
    }


def _read(file: int, at: int, size: int) -> bytes:
    if size > MAX_TABLE_BYTES or at >= 2**62:
        raise ValueError("a table that is too long")
    try:
        return os.pread(file, size, at)
    except OSError as fault:
        raise Unreadable(f"a program's file: {fault.strerror}") from fault
