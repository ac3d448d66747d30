"""The environment of a process as it is now, not as it was when its program started.

`/proc/PID/environ` keeps the environment of execve(2). Later changes, such as the rank that an
actor gets from its driver, are in the C library's variable `environ` alone. It is read from the
process's memory (/proc/PID/mem), which needs the same permission as py-spy.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shakedown.monitor.collect import proc

_MOST_VARIABLES = 4096
_LONGEST = 256  # of the rows that are kept: names of ranks and their values
_LONGEST_TABLE = 64 * 2**20
# ELF-64, little endian (elf(5)): the names that C libraries give the variable, and section types.
_NAMES = (b"environ", b"__environ", b"_environ")
_HEAD, _SECTION, _SYMBOL, _SEGMENT = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ", "<IIQQQQQQ"
_DYNSYM, _EXECUTABLE, _LOAD = 11, 2, 1
_POINTER = "<Q"


def environ_now(pid: int, wanted: tuple[bytes, ...]) -> dict[str, str]:
    """The variables whose `NAME=` begins with one of `wanted`; empty where they cannot be read."""
    with contextlib.suppress(OSError, struct.error, ValueError, OverflowError):
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for place in _places(pid):
                rows = [row for row in _rows(memory, place) if row.startswith(wanted)]
                pairs = (row.decode("utf-8", "replace").partition("=") for row in rows)
                if found := {name: value for name, _, value in pairs}:
                    return found
        finally:
            os.close(memory)
    return {}


def _places(pid: int) -> Iterator[int]:
    """Addresses of the variable: a program's own copy of it is the one that is used."""
    program = proc.link(f"/proc/{pid}/exe")
    seen: set[str] = set()
    for line in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines():
        columns = line.split(maxsplit=5)
        path = columns[5] if len(columns) == 6 else ""
        name = path.rpartition("/")[2]
        libc = name.startswith(("libc.so", "libc-", "ld-musl"))
        # The first mapping of a file is where it was loaded.
        if path in seen or not (path == program or libc):
            continue
        seen.add(path)
        base = int(columns[0].partition("-")[0], 16)
        seen_from_here = Path(f"/proc/{pid}/root{path}")
        status = seen_from_here.stat()
        found = _variable(seen_from_here, (status.st_dev, status.st_ino))
        if found is not None:
            yield found.value + (base - found.first if found.moved else 0)


class _Variable(NamedTuple):
    """The variable's address in a file; `first`: the lowest; `moved`: loaded at any address."""

    value: int
    first: int
    moved: bool


@lru_cache(64)
def _variable(path: Path, _inode: tuple[int, int]) -> _Variable | None:
    """The variable in the file's dynamic symbols; None where the file does not define it."""
    with path.open("rb") as stream:
        head = struct.unpack(_HEAD, stream.read(struct.calcsize(_HEAD)))
        if head[0][:6] != b"\x7fELF\x02\x01":
            return None

        def table(form: str, offset: int, count: int) -> list[tuple[int, ...]]:
            stream.seek(offset)
            return list(struct.iter_unpack(form, stream.read(struct.calcsize(form) * count)))

        def content(section: tuple[int, ...]) -> bytes:
            stream.seek(section[4])
            return stream.read(min(section[5], _LONGEST_TABLE))

        segments = table(_SEGMENT, head[5], head[10])
        sections = table(_SECTION, head[6], head[12])
        first = min((row[3] & ~0xFFF for row in segments if row[0] == _LOAD), default=0)
        for section in (row for row in sections if row[1] == _DYNSYM):
            names = b"\0" + content(sections[section[6]])
            numbers = {at for name in _NAMES if (at := names.find(b"\0" + name + b"\0")) >= 0}
            for symbol in struct.iter_unpack(_SYMBOL, content(section)):
                # Its section is 0 where another file defines it.
                if symbol[0] in numbers and symbol[3]:
                    return _Variable(symbol[4], first, moved=head[1] != _EXECUTABLE)
    return None


def _rows(memory: int, place: int) -> Iterator[bytes]:
    """`NAME=VALUE` of each variable, their first bytes."""
    (array,) = struct.unpack(_POINTER, os.pread(memory, 8, place))
    size = struct.calcsize(_POINTER)
    for number in range(_MOST_VARIABLES if array else 0):
        (row,) = struct.unpack(_POINTER, os.pread(memory, size, array + size * number))
        if not row:
            return
        yield os.pread(memory, _LONGEST, row).partition(b"\0")[0]
