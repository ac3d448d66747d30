r"""Values of short answers such as `2\sqrt{3}`, `\frac{1}{2}`, `45^\circ`; bounded, never raises.

expression = term { ("+" | "-") term }      term = power { ["*" | "/"] power }
power = atom [ "^" atom ]                   atom = { "-" } ( number | pi | "(" expression ")" |
                                              \sqrt [ "[" number "]" ] atom | \frac atom atom )
A whole number before a proper fraction is a mixed number, `1\frac{1}{2}`; bare digits after \frac
are one each, as in LaTeX.

Not math-verify: its only bound is an alarm, which is the reward worker's own, works in no other
thread and lets `9!!!!` or fifty brackets run for 5 s; it takes 100 times as long, and reads a mixed
number `1 1/2` as 1.
"""

import math
import re
from decimal import Decimal

from shakedown.agents.rewards.text import plain_signs

_LONGEST = 200  # characters of an answer that is read as a value
_DEEPEST = 20  # nested brackets: the reader is recursive, and the text is hostile
_LARGEST_EXPONENT = 64  # either way: a larger power is not an answer, and may overflow
_RELATIVE = 1e-9  # far above the rounding of some ten operations, far below rounded answers

# Units are in these; where they hold the whole answer, as in `\text{A}`, it is what they hold.
_WORDS = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}(?:\^\{?[23]\}?)?")
_BOLD = re.compile(r"\\(?:mathbf|textbf|boldsymbol|bm)\{([^{}]*)\}")
_DROPPED = re.compile(r"\^\{?\\circ\}?|\\degree|°|\\left|\\right|\\[,;!: %$]|[$%]|degrees?")
_UNIT = re.compile(
    r"(?<=[0-9})])(?:square|cubic|sq\.?)?"
    r"(?:cm|mm|km|m|ft|feet|foot|in|inch|inches|yd|yards|miles|meters|units?)(?:\^\{?[23]\}?)?\.?$"
)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_BARE_FRACTION = re.compile(r"(\\[dt]?frac)\s*([0-9])\s+([0-9])")
_MIXED = re.compile(r"(?<![0-9.])([0-9]+)\s+([0-9]+)/([0-9]+)")  # `1 1/2` is no `11/2`
_APART = re.compile(r"(?<=[0-9])\s+(?=[0-9])(?![0-9]{3}(?![0-9]))")  # nor `4 2` a `42`
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_PROPER = re.compile(r"\\frac(?:\{([0-9]+)\}|([0-9]))(?:\{([0-9]+)\}|([0-9]))(?![0-9])")
_TOKEN = re.compile(
    r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\\[dt]?frac|\\sqrt|√|\\pi|π|\\times|×|\\cdot|[-+*/^(){}\[\]]"
)
_NAMES = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "√": "\\sqrt",
    "π": "\\pi",
    "\\times": "*",
    "×": "*",
    "\\cdot": "*",
}
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class _NoValueError(Exception):
    """The text is not an expression of this grammar."""


def same_value(given: str, expected: str) -> bool:
    """Whether two answers are the same number, or else the same text without spaces.

    Plain decimals are compared exactly, other expressions to a relative 1e-9, texts without regard
    to capitals. An empty text is not an answer.
    """
    left, right = _plain(given), _plain(expected)
    if not left or not right:
        return False
    if _DECIMAL.fullmatch(left) and _DECIMAL.fullmatch(right):
        return Decimal(left) == Decimal(right)
    first, second = value_of(left), value_of(right)
    if first is None or second is None:
        return left.casefold() == right.casefold()
    return math.isclose(first, second, rel_tol=_RELATIVE, abs_tol=1e-12)


def value_of(text: str) -> float | None:
    """The finite value of an expression, or None."""
    plain = _plain(text)
    if _DECIMAL.fullmatch(plain):
        number = float(plain)
        return number if math.isfinite(number) else None
    tokens = _TOKEN.findall(plain) if len(plain) <= _LONGEST else []
    if not tokens or "".join(tokens) != plain:
        return None
    reader = _Reader([_NAMES.get(token, token) for token in tokens])
    try:
        value = reader.whole()
    except (_NoValueError, ArithmeticError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _plain(text: str) -> str:
    """Without spaces, units, degrees and thousands separators; what stands after the last `=`."""
    if len(text) > _LONGEST:
        bare = "".join(_DROPPED.sub("", _WORDS.sub("", text)).split())
        return _tidy(bare) if len(bare) <= _LONGEST else bare
    short = _BOLD.sub(r"\1", plain_signs(text.rpartition("=")[2]))
    short = _WORDS.sub("", short) if _WORDS.sub("", short).strip() else _WORDS.sub(r"\1", short)
    short = _BARE_FRACTION.sub(r"\1{\2}{\3}", _DROPPED.sub("", short))
    apart = _APART.sub(";", _MIXED.sub(r"\1\\frac{\2}{\3}", short))
    return _tidy("".join(apart.split()))


def _tidy(bare: str) -> str:
    return _THOUSANDS.sub("", _UNIT.sub("", bare)).rstrip(".")


class _Reader:
    """Reads one expression; raises _NoValueError or what arithmetic raises."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._place = tokens, 0

    def whole(self) -> float:
        """The value of all tokens."""
        value = self._expression(0)
        if self._next():
            raise _NoValueError
        return value

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._place += 1
        return token

    def _expression(self, depth: int) -> float:
        value = self._term(depth)
        while self._next() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._term(depth)
        return value

    def _term(self, depth: int) -> float:
        value = self._power(depth)
        while self._next() and self._next() not in "+-)}]^":
            operator = self._take() if self._next() in ("*", "/") else "*"
            factor = self._power(depth)
            value = value * factor if operator == "*" else value / factor
        return value

    def _power(self, depth: int) -> float:
        sign = self._sign()
        base = self._atom(depth)
        if self._next() == "^":
            self._take()
            exponent = self._sign() * self._atom(depth)
            if abs(exponent) > _LARGEST_EXPONENT:
                raise _NoValueError
            base = math.pow(base, exponent)
        return sign * base

    def _sign(self) -> int:
        sign = 1
        while self._next() == "-":
            self._take()
            sign = -sign
        return sign

    def _atom(self, depth: int) -> float:
        if depth > _DEEPEST:
            raise _NoValueError
        token = self._take()
        if token[:1].isdigit() or token[:1] == ".":
            return float(token) + (self._proper() if token.isdigit() else 0.0)
        if token == "\\pi":
            return math.pi
        if token in ("(", "{"):
            return self._closed(token, depth)
        if token == "\\frac":
            return self._part(depth) / self._part(depth)
        if token == "\\sqrt":
            degree = self._degree(depth)
            return math.pow(self._atom(depth + 1), 1 / degree)
        raise _NoValueError

    def _part(self, depth: int) -> float:
        r"""A part of a fraction: braces, or one digit, as in LaTeX: `\frac12` is a half."""
        token = self._next()
        if token.isdigit() and len(token) > 1:
            self._tokens[self._place] = token[1:]
            return float(token[0])
        return self._atom(depth + 1)

    def _proper(self) -> float:
        r"""The fraction of a mixed number, `1\frac{1}{2}`, whose whole part was read; else 0."""
        found = _PROPER.match("".join(self._tokens[self._place : self._place + 7]))
        if not found:
            return 0.0
        above, below = (int(digits) for digits in found.groups() if digits)
        if not 0 < above < below:  # not mixed: a product
            return 0.0
        read = 0
        while read < found.end():
            read += len(self._take())
        return above / below

    def _degree(self, depth: int) -> float:
        return self._closed(self._take(), depth) if self._next() == "[" else 2.0

    def _closed(self, opening: str, depth: int) -> float:
        value = self._expression(depth + 1)
        if self._take() != _CLOSING[opening]:
            raise _NoValueError
        return value
