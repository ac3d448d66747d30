"""Types of command-line arguments: a number within its bounds, else a sentence that names them."""

import argparse
import math
from collections.abc import Callable

_MOST = 10**9
_LONGEST = 1e7  # seconds: 116 days


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """A type for whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        plain = text.isascii() and text.isdecimal() and len(text) <= 20
        if not plain or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, got {text!r:.60}"
            )
        return int(text)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """A type for numbers from `least` to `most`."""

    def parse(text: str) -> float:
        value = _float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a number from {least:g} to {most:g}, got {text!r:.60}"
            )
        return value

    return parse


def above_zero(text: str) -> float:
    """A number above 0 and below 1e7: a time in seconds, a size."""
    value = _float(text)
    if not 0 < value < _LONGEST:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0 and below {_LONGEST:.0f}, got {text!r:.60}"
        )
    return value


def _float(text: str) -> float:
    """NaN, which lies in no range, for what is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


positive = whole(1)
