r"""Values of short answers such as `2\sqrt{3}`, `\frac{1}{2}`, `45^\circ`; bounded, never raises.

expression = term { ("+" | "-") term }      term = power { ["*" | "/"] power }
power = atom [ "^" atom ]                   atom = { "-" } ( number | pi | "(" expression ")" |
                                              \sqrt [ "[" number "]" ] atom | \frac atom atom )
"""

import math
import re
from decimal import Decimal, InvalidOperation

_LONGEST = 200  # characters of an answer that is read as a value
_DEEPEST = 20
_LARGEST_EXPONENT = 64
_RELATIVE = 1e-9  # far above the rounding of some ten operations, far below rounded answers

_DROPPED = re.compile(
    r"\\text\{[^{}]*\}(?:\^\{?[23]\}?)?|\\mathrm\{[^{}]*\}(?:\^\{?[23]\}?)?"
    r"|\^\{?\\circ\}?|\\degree|°|\\left|\\right|\\[,;!: %$]|[$%]|degrees?"
)
_UNIT = re.compile(
    r"(?<=[0-9})])(?:square|cubic|sq\.?)?"
    r"(?:cm|mm|km|m|ft|feet|foot|in|inch|inches|yd|yards|miles|meters|units?)(?:\^\{?[23]\}?)?\.?$"
)
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
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
    """The text is no expression of this grammar."""


def same_value(given: str, expected: str) -> bool:
    """Whether two answers are the same number, or else the same text without spaces.

    Plain decimals are compared exactly, other expressions to a relative 1e-9. An empty text is
    no answer.
    """
    left, right = _plain(given), _plain(expected)
    if not left or not right:
        return False
    try:
        return Decimal(left) == Decimal(right)
    except InvalidOperation:
        first, second = value_of(left), value_of(right)
    if first is None or second is None:
        return left == right
    return math.isclose(first, second, rel_tol=_RELATIVE, abs_tol=1e-12)


def value_of(text: str) -> float | None:
    """The finite value of an expression, or None."""
    plain = _plain(text)
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
    short = text.rpartition("=")[2] if len(text) <= _LONGEST else text
    bare = "".join(_DROPPED.sub("", short).split())
    return _THOUSANDS.sub("", _UNIT.sub("", bare)).rstrip(".") if len(bare) <= _LONGEST else bare


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
            return float(token)
        if token == "\\pi":
            return math.pi
        if token in ("(", "{"):
            return self._closed(token, depth)
        if token == "\\frac":
            return self._atom(depth + 1) / self._atom(depth + 1)
        if token == "\\sqrt":
            degree = self._degree(depth)
            return math.pow(self._atom(depth + 1), 1 / degree)
        raise _NoValueError

    def _degree(self, depth: int) -> float:
        return self._closed(self._take(), depth) if self._next() == "[" else 2.0

    def _closed(self, opening: str, depth: int) -> float:
        value = self._expression(depth + 1)
        if self._take() != _CLOSING[opening]:
            raise _NoValueError
        return value
