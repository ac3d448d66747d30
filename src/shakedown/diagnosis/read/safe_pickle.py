"""Pickle as plain data: dumps come from other machines and may be hostile.

A pickle is a program. Its opcodes are checked before it runs: only those that build plain
values are let through, so no name is ever resolved and nothing is called. What would take memory
or time out of proportion is refused as well: memo indexes and strings beyond the data, numbers
of more than 72 bits, and tuples in tuples, which cost exponential time as keys of a dict.

The usual dump is checked by one regular expression, as opcodes are a regular language up to
strings of 255 bytes. Whatever it does not match goes through `pickletools`, 30 times as slow.
"""

import io
import pickle
import pickletools
import re
from functools import cache
from typing import IO, Any

_PLAIN = frozenset(
    """PROTO FRAME STOP MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS""".split()
)
_MAX_BITS = 72  # an unsigned 64-bit number takes nine bytes


class UnsafePickleError(ValueError):
    """The pickle asks for more than plain data, or is damaged."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise UnsafePickleError(f"pickle refers to {module}.{name}: refused")


def loads(data: bytes) -> Any:
    """Build the plain value in `data`.

    Raises:
        UnsafePickleError: an opcode that is not plain data, or a damaged pickle.
    """
    if not is_usual(data):
        _check(data)
    try:
        return _PlainUnpickler(_stream_of(data)).load()
    except UnsafePickleError:
        raise
    # A crafted stack makes the unpickler raise almost anything; the input is at fault.
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError) as error:
        raise UnsafePickleError(f"damaged pickle: {error}") from error
    except (AttributeError, OverflowError, MemoryError, RecursionError) as error:
        raise UnsafePickleError(f"damaged pickle: {type(error).__name__}") from error


def _stream_of(data: bytes) -> IO[bytes]:
    """Without frames (protocol 4) the unpickler reads opcode by opcode, unless it may peek."""
    stream = io.BytesIO(data)
    return stream if data[1:2] >= b"\x04" else io.BufferedReader(stream, 2**16)


def is_usual(data: bytes) -> bool:
    """Whether the fast check alone proves that `data` holds plain, bounded opcodes."""
    if data[:1] != b"\x80":
        return False
    return _matches(_fetched() if data[1:2] < b"\x04" else _written(), data)


def _matches(grammar: re.Pattern[bytes], data: bytes) -> bool:
    """Match up to STOP; strings above 255 bytes and high memo indexes are stepped over here."""
    at = 2
    while match := grammar.match(data, at):
        at = match.end()
        # An opcode and a 4-byte number: the two opcodes that the pattern cannot hold have this
        # form.
        head = data[at : at + 5]
        number = int.from_bytes(head[1:], "little")
        if head[:1] == b".":
            return True
        if len(head) < 5 or number > len(data):
            return False
        # BINUNICODE: the number is the length of the string that follows.
        if head[:1] == b"X":
            at += 5 + number
        # LONG_BINPUT: the number is an index of the memo, which is allocated up to it.
        elif head[:1] == b"r":
            at += 5
        else:
            return False
    return False


# Opcodes by their bytes, as in `pickletools.opcodes`. q BINPUT and r LONG_BINPUT (an index below
# 65536) store the last value in the memo under a number, \x94 MEMOIZE under the next one; h and j
# fetch it again.
_PUT = rb"(?:q.|r..\0\0|\x94)"
_GET = rb"h.|j...."
# EMPTY_LIST, MARK, EMPTY_DICT, SETITEMS, APPENDS, APPEND, SETITEM, LIST, DICT.
_BUILD = rb"[\](}ueasld]"
_BUILD_OR_MEMOIZE = rb"[\](}ueasld\x94]++"
# What usually follows a dict's key: BINGET or BININT1, NONE, true and false, BININT2, an 8-byte
# LONG1, BININT. All repetitions are possessive (`*+`): a failed match never goes back, so it stays
# linear.
_AFTER_KEY = rb"[hK].|[N\x88\x89]|M..|\x8a\x08.{8}|J...."


@cache
def _fetched() -> re.Pattern[bytes]:
    """Protocols 2 and 3, torch's C++: elements of tuples may come from the memo, no tuple is in it.

    A PUT is matched only right after what it names: else it could name a tuple.
    """
    near, far = (
        b"(?:" + _GET + b"|" + _literal(b"X", rb"\0\0\0", longest) + _PUT + b"?+)"
        for longest in (63, 255)
    )
    return _elements(near, far, _BUILD + _PUT + b"?+", after=rb"(?![\x94qr])")


@cache
def _written() -> re.Pattern[bytes]:
    """Protocols 4 and 5, Python: elements of tuples are written in front of them, not fetched."""
    near, far = (_literal(rb"\x8c", b"", longest) + _PUT + b"?+" for longest in (63, 255))
    run = b"h.(?:" + _AFTER_KEY + b"|" + _BUILD_OR_MEMOIZE + b")*+"  # most of a dump, in one step
    others = run, _BUILD_OR_MEMOIZE, _PUT, _GET, rb"\x95.{5}\0\0\0"
    return _elements(near, far, *others, after=b"")


def _elements(near: bytes, far: bytes, *others: bytes, after: bytes) -> re.Pattern[bytes]:
    """Runs of elements, each perhaps ended by a tuple of its last one, two or three.

    `far` allows longer strings than `near`, which is compiled thrice; `after` follows a tuple.
    """
    many = b"(?:%s)++(?:[\\x85-\\x87]%s)?+" % (far, after)
    two = b"(?:%s)(?:[\\x85\\x86]%s|%s)?+" % (near, after, many)
    one = b"(?:%s)(?:\\x85%s|%s)?+" % (near, after, two)
    return re.compile(b"(?:" + b"|".join([*others, one, far]) + b")*+", re.DOTALL)


def _literal(opcode: bytes, padding: bytes, longest: int) -> bytes:
    """One scalar or a string of at most `longest` bytes: `opcode`, its length padded, its bytes."""
    # One alternative for each length: a pattern cannot read a length out of the data.
    counted = [(re.escape(bytes([n])), n) for n in range(longest + 1)]
    strings = b"|".join(b"%s%s.{%d}" % (byte, padding, n) for byte, n in counted)
    numbers = b"|".join(b"%s.{%d}" % row for row in counted[: _MAX_BITS // 8 + 1])
    rest = rb"[N\x88\x89)]|K.|M..|J....|G.{8}"
    return b"(?:%s(?:%s)|%s|\\x8a(?:%s))" % (opcode, strings, rest, numbers)


def _check(data: bytes) -> None:
    """The exact check, for what the fast one cannot prove."""
    machine = _Machine()
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name not in _PLAIN:
                raise UnsafePickleError(
                    f"pickle opcode {opcode.name} at byte {position} is not plain data: refused"
                )
            # The C unpickler allocates its memo up to this index.
            if "PUT" in opcode.name and int(argument or 0) > len(data):
                raise UnsafePickleError(f"pickle memo index at byte {position} is absurd")
            if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
                raise UnsafePickleError(f"pickle number at byte {position} is absurd")
            if not machine.step(opcode, argument):
                raise UnsafePickleError(f"pickle tuple in a tuple at byte {position}: refused")
    except UnsafePickleError:
        raise
    except Exception as error:  # genops raises whatever the bytes provoke
        raise UnsafePickleError(f"damaged pickle: {error}") from error


class _Machine:
    """The unpickler's stack and memo, of which only this is kept: what is a filled tuple."""

    _MARK = object()

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> bool:
        """Run one opcode; False when it puts a tuple into a tuple."""
        name, stack = opcode.name, self._stack
        if name == "MEMOIZE" or "PUT" in name:
            self._memo[len(self._memo) if argument is None else int(argument)] = stack[-1]
            return True
        if name.endswith("GET"):
            stack.append(self._memo[int(argument)])
            return True
        taken = self._take(opcode)
        if name == "MARK":
            stack.append(self._MARK)
        elif opcode.stack_after:
            stack.append(name.startswith("TUPLE"))
        return not (name.startswith("TUPLE") and True in taken)

    def _take(self, opcode: pickletools.OpcodeInfo) -> list[object]:
        """What the opcode pops: all above the last mark, then what it names below it."""
        before, taken = list(opcode.stack_before), []
        if pickletools.markobject in before:
            while (top := self._stack.pop()) is not self._MARK:
                taken.append(top)
            before = before[: before.index(pickletools.markobject)]
        return [*taken, *(self._stack.pop() for _ in before)]
