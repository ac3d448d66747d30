"""Where the interpreter's symbols are in a process: its program's or libpython's, moved or not."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from shakedown.hang.collect import proc
from shakedown.hang.collect.remote.elf import HEAD_BYTES, Image, read_image
from shakedown.hang.collect.remote.memory import Memory, Unreadable

SYMBOLS = {
    "_PyRuntime": 8,  # multiples that their addresses are of
    "Py_Version": 8,
    "PyCode_Type": 8,
    "PyUnicode_Type": 8,
    "PyBytes_Type": 8,
    "PyDict_Type": 8,
    "PyModule_Type": 8,
    "PyLong_Type": 8,
}
MAX_MAPS = 8 * 2**20  # bytes of a process's map: some 80,000 mappings
_LIBRARY = re.compile(rb"/libpython3\.\d+[a-z]*\.so[.\d]*\Z")
# start-end permissions offset device inode path, proc(5); only the first part of a file
_FIRST = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r\S+ 0+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)


class _Mapping(NamedTuple):
    start: int
    end: int
    path: bytes


class Images:
    """Finds symbols; a file is read once, however many processes run it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], Image] = {}

    def symbols(self, pid: int, memory: Memory) -> Mapping[str, int]:
        """Addresses of SYMBOLS in the process.

        Raises:
            Unreadable: no interpreter is found, or more than one.
        """
        program, libraries = _mappings(pid)
        own = [m for m in program[:1] if b"python" in m.path.rpartition(b"/")[2]]
        found = []
        for mapping in [*own, *libraries]:
            image = self._image(pid, mapping, memory)
            if "_PyRuntime" in image.symbols:
                moved = mapping.start - image.wanted
                found.append({name: value + moved for name, value in image.symbols.items()})
        if len(found) != 1:
            raise Unreadable(f"{len(found)} interpreters found")
        wrong = [n for n, size in SYMBOLS.items() if found[0].get(n, 1) % size]
        if wrong:
            raise Unreadable(f"symbol {wrong[0]} is missing")
        return found[0]

    def _image(self, pid: int, mapping: _Mapping, memory: Memory) -> Image:
        file = _open(pid, mapping)
        try:
            status = os.fstat(file)
            key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            image = self._known.get(key)
            if image is None:
                image = self._known[key] = read_image(file, list(SYMBOLS))
        except OSError as error:
            raise Unreadable(f"a program's file: {error.strerror}") from error
        finally:
            os.close(file)
        # by content: overlays give other inodes, and a path may hold another file by now
        size = min(HEAD_BYTES, len(image.head), mapping.end - mapping.start)
        if memory.read(mapping.start, size) != image.head[:size]:
            raise Unreadable("a program's file is not the one that runs")
        return image


def _mappings(pid: int) -> tuple[list[_Mapping], list[_Mapping]]:
    """The first parts of the process's program, and of its libpython."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as stream:
            text = stream.read(MAX_MAPS)
    except OSError as error:
        raise Unreadable(f"maps: {error.strerror}") from error
    program = os.fsencode(proc.link(f"/proc/{pid}/exe"))
    parts = [m for m in _FIRST.finditer(text) if m[3] == program or _LIBRARY.search(m[3])]
    rows = [_Mapping(int(m[1], 16), int(m[2], 16), m[3]) for m in parts]
    libraries = {row.path: row for row in reversed(rows) if row.path != program}
    return [row for row in rows if row.path == program], list(libraries.values())


def _open(pid: int, mapping: _Mapping) -> int:
    """The mapped file itself where we may, else what is at its path as the process sees it."""
    paths: list[str | bytes] = [
        f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}",
        b"/proc/%d/root%s" % (pid, mapping.path),
    ]
    for path in paths:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            fault = error
    raise Unreadable(f"a program's file: {fault.strerror}") from fault
