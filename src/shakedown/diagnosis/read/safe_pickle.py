"""Pickle as plain data: dumps come from other machines and may be hostile.

A pickle is a program. Its opcodes are checked before it runs: only those that build plain
values are let through, so no name is ever resolved and nothing is called. What would take memory
or time out of proportion is refused as well: memo indexes and strings beyond the data, numbers
of more than 72 bits, tuples in tuples, which cost exponential time as keys of a dict, and keys
whose hashes a file can choose. Python draws the hashes of text anew in each process; those of
numbers, and of tuples of numbers, are known: a million keys of one hash take hours.

The usual dump is checked by one regular expression, as opcodes are a regular language up to
strings of 255 bytes. Whatever it does not match goes through `pickletools`, 30 times as slow.
"""

import io
import pickle
import pickletools
import re
from enum import Enum, auto
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
# Numbers hash modulo 2**61 - 1: below these bounds no more than a few share a hash.
_MAX_KEY, _MIN_KEY = 2.0**63, 2.0**-31


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
# EMPTY_LIST and EMPTY_DICT, perhaps with a batch of nothing: MARK and APPENDS or SETITEMS. Below
# another value such a batch would do nothing, and a PUT after it would store that value.
_EMPTY = rb"[\]}](?:\([eu])?+"
_MARK = rb"\((?![eu])"
# SETITEMS, APPENDS, APPEND, SETITEM, LIST, DICT: all leave a list or a dict.
_BUILT = rb"[ueasld]"
_BUILD_OR_MEMOIZE = rb"[\](}ueasld\x94]++"
# What usually follows a dict's key: BINGET or BININT1, NONE, true and false, BININT2, an 8-byte
# LONG1, BININT. All repetitions are possessive (`*+`): a failed match never goes back, so it stays
# linear.
_AFTER_KEY = rb"[hK].|[N\x88\x89]|M..|\x8a\x08.{8}|J...."
# The same with LONG1 of up to 8 bytes, and BINFLOAT of 0 and of 2**-31 to 2**49. None of them is
# stored or taken into a tuple: as keys these numbers spread well, in tuples they need not.
_NUMBER = (
    rb"K.|M..|J....|\x8a(?:"
    + b"|".join(b"%s.{%d}" % (re.escape(bytes([n])), n) for n in range(9))
    + rb")|G(?:[\x3e-\x42].{7}|\0{8})"
)


@cache
def _fetched() -> re.Pattern[bytes]:
    """Protocols 2 and 3, torch's C++: elements of tuples may come from the memo.

    A PUT is matched only right after text, a list or a dict, so nothing else is in the memo.
    """
    near, far = (
        b"(?:" + _GET + b"|" + _literal(b"X", rb"\0\0\0", longest) + _PUT + b"?+)"
        for longest in (63, 255)
    )
    built, empty = _BUILT + _PUT + b"?+", _EMPTY + _PUT + b"?+"
    return _elements(near, far, built, empty, _MARK, after=rb"(?![\x94qr])")


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
    return re.compile(b"(?:" + b"|".join([*others, _NUMBER, one, far]) + b")*+", re.DOTALL)


def _literal(opcode: bytes, padding: bytes, longest: int) -> bytes:
    """A constant or a string of at most `longest` bytes: `opcode`, its length padded, its bytes."""
    # One alternative for each length: a pattern cannot read a length out of the data.
    counted = [(re.escape(bytes([n])), n) for n in range(longest + 1)]
    strings = b"|".join(b"%s%s.{%d}" % (byte, padding, n) for byte, n in counted)
    return b"(?:%s(?:%s)|[N\x88\x89)])" % (opcode, strings)


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
            if refused := machine.step(opcode, argument):
                raise UnsafePickleError(f"pickle {refused} at byte {position}: refused")
    except UnsafePickleError:
        raise
    except Exception as error:  # genops raises whatever the bytes provoke
        raise UnsafePickleError(f"damaged pickle: {error}") from error


class _Kind(Enum):
    """What the checks ask of a value."""

    TEXT = auto()  # also bytes, None, true and false: nobody can choose their hashes
    NUMBER = auto()  # spreads as a key; in a tuple it need not
    WIDE = auto()  # a number of which many share a hash
    TUPLE = auto()  # of text alone
    MIXED = auto()  # a tuple of anything else
    BOX = auto()  # a list or a dict


_TEXT = frozenset({_Kind.TEXT})
_TUPLES = frozenset({_Kind.TUPLE, _Kind.MIXED})
# A list as a key is an error at once, in the unpickler.
_KEYS = frozenset({_Kind.TEXT, _Kind.NUMBER, _Kind.TUPLE, _Kind.BOX})


class _Machine:
    """The unpickler's stack and memo, of which only the kinds are kept."""

    def __init__(self) -> None:
        self._stack: list[_Kind] = []
        self._marks = [0]  # how much of the stack lies below each mark
        self._memo: dict[int, _Kind] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> str:
        """Run one opcode; what is wrong with it, or an empty string."""
        name = opcode.name
        if name == "MEMOIZE" or "PUT" in name:
            self._memo[len(self._memo) if argument is None else int(argument)] = self._top()
        elif name.endswith("GET"):
            self._stack.append(self._memo[int(argument)])
        elif name == "MARK":
            self._marks.append(len(self._stack))
        elif name in ("LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            return self._fill(name)
        elif name.startswith("TUPLE"):
            items = self._take(int(name[5:])) if name[5:] else self._above_mark()
            self._stack.append(_Kind.TUPLE if _TEXT.issuperset(items) else _Kind.MIXED)
            return "" if _TUPLES.isdisjoint(items) else "tuple in a tuple"
        elif opcode.stack_after:
            self._stack.append(_kind_of(name, argument))
        return ""

    def _fill(self, name: str) -> str:
        """A new list or dict of what stands above the mark, or items into the one below them."""
        pairs = name in ("DICT", "SETITEM", "SETITEMS")
        items = self._take(1 + pairs) if name in ("APPEND", "SETITEM") else self._above_mark()
        if name in ("LIST", "DICT"):
            self._stack.append(_Kind.BOX)
        # Checked although the unpickler does: a batch of nothing leaves it any value untouched.
        elif self._top() is not _Kind.BOX:
            return "item of what is no list or dict"
        return "" if not pairs or _KEYS.issuperset(items[::2]) else "key whose hash can be chosen"

    def _top(self) -> _Kind:
        (top,) = self._take(1)
        self._stack.append(top)
        return top

    def _take(self, count: int) -> list[_Kind]:
        first = len(self._stack) - count
        if first < self._marks[-1]:
            raise ValueError("too few values above the mark")
        taken = self._stack[first:]
        del self._stack[first:]
        return taken

    def _above_mark(self) -> list[_Kind]:
        if len(self._marks) == 1:
            raise ValueError("no mark")
        taken = self._take(len(self._stack) - self._marks[-1])
        self._marks.pop()
        return taken


def _kind_of(name: str, argument: Any) -> _Kind:
    if name in ("EMPTY_LIST", "EMPTY_DICT"):
        return _Kind.BOX
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        return _Kind.TEXT
    if isinstance(argument, float) and argument and not abs(argument) >= _MIN_KEY:
        return _Kind.WIDE
    return _Kind.NUMBER if abs(argument) <= _MAX_KEY else _Kind.WIDE
