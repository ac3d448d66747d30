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
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3})")
_MINUS = "\u2212"  # what models write for `-` in prose
_BOX = "\\boxed{"


def tail(text: str) -> str:
    """The last `LONGEST` characters."""
    return text[-LONGEST:]


def plain_signs(text: str) -> str:
    r"""`1{,}000` and `1\,000` as `1,000`; the minus sign of typography as a hyphen."""
    return _LATEX_THOUSANDS.sub(",", text).replace(_MINUS, "-")


def last_number(text: str) -> Decimal | None:
    """The last number after `####` if that stands there, else of the whole text."""
    found = _NUMBER.findall(plain_signs(tail(text).rpartition("####")[2]))
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


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
