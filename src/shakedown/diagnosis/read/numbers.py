"""Numbers of an input, taken only where they can be what they claim to be."""

from typing import Any

MAX_RANK = 10**7  # exclusive; no job has more, and a range up to it still fits in memory
MAX_PID = 2**31
MAX_COUNT = 2**63


def rank_of(value: Any) -> int | None:
    """A rank, or None: `true`, -1, 1e9 and text are none."""
    # `type` rather than isinstance: a bool is an int to Python.
    return value if type(value) is int and 0 <= value < MAX_RANK else None


def pid_of(value: Any) -> int | None:
    """A process id, or None."""
    return value if type(value) is int and 0 < value < MAX_PID else None


def count_of(value: Any, otherwise: int) -> int:
    """A counter, a size or a line; gloo's JSON writes its counters as strings.

    Numbers of more than 64 bits are nobody's count, and Python refuses to print the longest.
    """
    # Fewer than 20 characters: 64 bits have at most 19 digits.
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    return value if type(value) is int and -MAX_COUNT <= value < MAX_COUNT else otherwise
