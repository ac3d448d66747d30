"""Where the final answer of a text stands; linear in the text's length, never raises."""

import re
from decimal import Decimal, InvalidOperation

# A text longer than this is cut to its end, where answers stand: bounds every search.
LONGEST = 100_000
# A minus between two numbers is a difference: `10-7` ends in 7. Commas stand before three digits.
_NUMBER = re.compile(
    r"(?:(?<![0-9)}])-)?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.)}\]])\.[0-9]+)"
)
# `1/2` and `1 1/2` are one value each; possessive, so that no text makes the search slow.
_FRACTION = re.compile(r"(?:\s++[0-9]++)?\s*+/\s*+[0-9]++(?![0-9.,]*[0-9])")
_FULL_WIDTH = {0xFF01 + offset: 0x21 + offset for offset in range(94)}  # as `18` in full width
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3})")
_MINUS = "\u2212"  # what models write for `-` in prose
_BOX = "\\boxed{"


def tail(text: str) -> str:
    """The last `LONGEST` characters."""
    return text[-LONGEST:]


def plain_signs(text: str) -> str:
    r"""`1{,}000` and `1\,000` as `1,000`; the minus sign of typography as a hyphen; full-width
    signs, as Chinese and Japanese keyboards write them, as ASCII.
    """
    return _LATEX_THOUSANDS.sub(",", text.translate(_FULL_WIDTH)).replace(_MINUS, "-")


def last_number(text: str) -> Decimal | None:
    """The number that `final_value` finds; None without one, or where it is a fraction."""
    try:
        return Decimal(final_value(text))
    except InvalidOperation:
        return None


def final_value(text: str) -> str:
    """The first number after the last `####`, as GSM8K's own reader takes it; without that mark the
    last number of the text. A fraction or a mixed number is one value. Empty: there is none.
    """
    _, mark, rest = plain_signs(tail(text)).rpartition("####")
    found = ""
    place = 0
    while number := _NUMBER.search(rest, place):
        fraction = _FRACTION.match(rest, number.end())
        place = fraction.end() if fraction else number.end()
        found = rest[number.start() : place]
        if mark:
            break
    return found.replace(",", "").replace("$", "")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces matched; None without one."""
    _, mark, rest = tail(text).rpartition(_BOX)
    if not mark:
        return None
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:place].strip()
    return None
