"""Line numbers of a code object, as CPython packs them (3.11 on, Objects/locations.md)."""

from functools import lru_cache

_LONG, _NO_COLUMNS, _NONE = 14, 13, 15


@lru_cache(maxsize=65536)
def line_at(table: bytes, first: int, offset: int) -> int:
    """The line of the instruction at byte `offset`; where it has none, that of the one before.

    Raises:
        ValueError: the table is cut off.
    """
    line, end, at = first, 0, 0
    while at < len(table) and end <= offset:
        head = table[at]
        kind = head >> 3 & 15
        end += 2 * ((head & 7) + 1)
        at += 1
        if kind in (_LONG, _NO_COLUMNS):
            step, at = _number(table, at)
            line += -(step >> 1) if step & 1 else step >> 1
            for _ in range(3 if kind == _LONG else 0):
                _, at = _number(table, at)
        elif kind != _NONE:
            line += kind - 10 if kind >= 10 else 0
            at += 2 if kind >= 10 else 1
    return line


def _number(table: bytes, at: int) -> tuple[int, int]:
    """A number of 6 bits a byte, lowest first, and where the next one begins."""
    value = shift = 0
    while at < len(table) and shift < 36:
        value |= (table[at] & 63) << shift
        at += 1
        if not table[at - 1] & 64:
            return value, at
        shift += 6
    raise ValueError("a number in the line table is cut off or too long")
