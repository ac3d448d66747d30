"""Pickle as plain data: dumps come from other machines and may be hostile.

A pickle is a program. Its opcodes are checked before it runs: only those that build plain
values are let through, so no name is ever resolved and nothing is called.
"""

import io
import pickle
import pickletools
from typing import Any

_PLAIN = frozenset(
    """PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET""".split()
)
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


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
    _check(data)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except UnsafePickleError:
        raise
    # A crafted stack makes the unpickler raise almost anything; the input is at fault.
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError) as error:
        raise UnsafePickleError(f"damaged pickle: {error}") from error
    except (AttributeError, OverflowError, MemoryError, RecursionError) as error:
        raise UnsafePickleError(f"damaged pickle: {type(error).__name__}") from error


def _check(data: bytes) -> None:
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name not in _PLAIN:
                raise UnsafePickleError(
                    f"pickle opcode {opcode.name} at byte {position} is not plain data: refused"
                )
            # The C unpickler allocates its memo up to this index.
            if opcode.name in _MEMO and int(argument or 0) > len(data):
                raise UnsafePickleError(f"pickle memo index at byte {position} is absurd")
    except UnsafePickleError:
        raise
    except Exception as error:  # genops raises whatever the bytes provoke
        raise UnsafePickleError(f"damaged pickle: {error}") from error
