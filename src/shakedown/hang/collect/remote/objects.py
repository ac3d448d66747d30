"""Strings, code objects and dicts in another process's memory, each checked for what it is."""

from struct import iter_unpack, unpack
from typing import NamedTuple

from shakedown.hang.collect.remote.layout import BYTES, DICT, KEYS, MODULE, OBJECT, Layout
from shakedown.hang.collect.remote.linetable import line_at
from shakedown.hang.collect.remote.memory import Memory, Unreadable

MAX_TEXT = 4096  # characters of a name, py-spy's own bound
MAX_TABLE = 65536  # bytes of a line table
MAX_CODE = 2**24  # instructions of a function
MAX_ENTRIES = 65536  # of a dict
# Include/object.h, 3.11 on: the dict stands before the object; the type was made at run time.
_MANAGED_DICT, _HEAP_TYPE, _READY = 1 << 4, 1 << 9, 1 << 12
_GENERAL = 0  # kind of a dict's keys whose entries hold the hash, too

Items = list[tuple[int, int]]  # addresses of keys and values


class Types(NamedTuple):
    """Addresses of the types that objects are checked against."""

    code: int
    text: int
    bytes: int
    dict: int
    module: int
    long: int


class Code(NamedTuple):
    """A code object: what a frame of it is called."""

    name: str
    filename: str
    first_line: int
    table: bytes
    begin: int  # address of its first instruction
    instructions: int

    def line(self, instruction: int) -> int:
        """The line of the instruction at this address, the last one that began.

        Raises:
            Unreadable: it is none of this code's.
        """
        offset = instruction - self.begin
        if offset & 1 or not -2 <= offset < 2 * self.instructions:
            raise Unreadable("an instruction outside of its code")
        try:
            return line_at(self.table, self.first_line, offset)
        except ValueError as error:
            raise Unreadable(str(error)) from error


class Objects:
    """The objects of one process. Every method raises Unreadable for what is not its kind."""

    def __init__(self, memory: Memory, layout: Layout, types: Types) -> None:
        self._memory, self._layout, self._types = memory, layout, types
        self._texts: dict[int, str] = {}
        self._codes: dict[int, Code] = {}

    def code(self, address: int) -> Code:
        """The code object at `address`."""
        known = self._codes.get(address)
        if known is None:
            known = self._codes[address] = self._code(address)
        return known

    def _code(self, address: int) -> Code:
        layout = self._layout
        body = self._memory.read(_aligned(address), layout.code.size)
        kind, size, first, filename, name, table = layout.code.unpack(body)
        if kind != self._types.code or not 0 < size <= MAX_CODE or first < 0:
            raise Unreadable("no code object")
        begin = address + layout.instructions
        return Code(self.text(name), self.text(filename), first, self.bytes(table), begin, size)

    def text(self, address: int) -> str:
        """A string, without the halves of characters that a file name may hold."""
        known = self._texts.get(address)
        if known is None:
            known = self._texts[address] = self._text(address)
        return known

    def _text(self, address: int) -> str:
        layout = self._layout
        head = self._memory.read(_aligned(address), layout.text.size)
        kind, length, state = layout.text.unpack(head)
        width, compact, ascii_only = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        codec = _CODECS.get((width, ascii_only))
        if kind != self._types.text or not compact or codec is None or not 0 <= length < MAX_TEXT:
            raise Unreadable("no string")
        begin = address + layout.text_sizes[not ascii_only]
        body = self._memory.read(begin, length * width) if length else b""
        try:
            text = body.decode(codec, "surrogatepass" if width > 1 else "strict")
        except UnicodeDecodeError as error:
            raise Unreadable(f"no string: {error.reason}") from error
        return text if ascii_only else text.encode("utf-8", "backslashreplace").decode()

    def bytes(self, address: int) -> bytes:
        """A bytes object."""
        kind, length = BYTES.unpack(self._memory.read(_aligned(address), BYTES.size))
        if kind != self._types.bytes or not 0 <= length < MAX_TABLE:
            raise Unreadable("no bytes")
        return self._memory.read(address + BYTES.size, length) if length else b""

    def number(self, address: int) -> int:
        """An int from 0 to 2**60 - 1, as ids of threads are."""
        layout = self._layout
        body = self._memory.read(_aligned(address), layout.long.size)
        kind, size, low, high = layout.long.unpack(body)
        digits = size >> layout.long_shift
        if kind != self._types.long or digits << layout.long_shift != size or not 0 < digits <= 2:
            raise Unreadable("no thread's id")
        return int(low | high << 30 if digits == 2 else low)

    def module_dict(self, address: int) -> int:
        """The address of a module's dict."""
        kind, body = MODULE.unpack(self._memory.read(_aligned(address), MODULE.size))
        if kind != self._types.module:
            raise Unreadable("no module")
        return int(body)

    def items(self, address: int) -> Items:
        """Addresses of a dict's keys and values, in order."""
        kind, used, keys, values = DICT.unpack(self._memory.read(_aligned(address), DICT.size))
        if kind != self._types.dict or not 0 <= used <= MAX_ENTRIES:
            raise Unreadable("no dict")
        return self._entries(keys, values)

    def attributes(self, address: int) -> Items:
        """The same of an object whose class is written in Python."""
        layout = self._layout
        (kind,) = OBJECT.unpack(self._memory.read(_aligned(address), OBJECT.size))
        (flags,) = layout.type.unpack(self._memory.read(_aligned(kind), layout.type.size))
        needed = _MANAGED_DICT | _HEAP_TYPE | _READY
        if flags & needed != needed:
            raise Unreadable("an object of another kind")
        values, body = self._values_or_dict(address)
        if not values:
            return self.items(body)
        return self._entries(self._pointers(kind + layout.cached_keys, 1)[0], values)

    def _values_or_dict(self, address: int) -> tuple[int, int]:
        """Where an object's attributes are: in values, in a dict, one of them 0."""
        values, body = self._pointers(address - 32, 2)
        if self._layout.tagged:
            return (body + 1, 0) if body & 1 else (0, body)
        return values, body

    def _entries(self, keys: int, values: int) -> Items:
        log2_index, kind, count = KEYS.unpack(self._memory.read(_aligned(keys), KEYS.size))
        if kind > 2 or log2_index > 24 or not 0 <= count <= MAX_ENTRIES:
            raise Unreadable("no dict")
        size = 24 if kind == _GENERAL else 16
        body = self._memory.read(keys + KEYS.size + (1 << log2_index), size * count)
        rows = [row[-2:] for row in iter_unpack("<QQQ" if kind == _GENERAL else "<QQ", body)]
        if values:
            held = self._pointers(values, count)
            rows = [(key, value) for (key, _), value in zip(rows, held, strict=True)]
        return [(key, value) for key, value in rows if key and value]

    def _pointers(self, address: int, count: int) -> tuple[int, ...]:
        return unpack(f"<{count}Q", self._memory.read(_aligned(address), 8 * count))


_CODECS = {(1, 1): "ascii", (1, 0): "latin-1", (2, 0): "utf-16-le", (4, 0): "utf-32-le"}


def _aligned(address: int) -> int:
    if address & 7:
        raise Unreadable(f"address {address:#x} is no object's")
    return address
