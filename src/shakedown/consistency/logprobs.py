"""A server's log-probabilities, each checked before it is averaged, as answers may be hostile."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shakedown.consistency.compare import Array
from shakedown.core.verdict import Finding

# Engines take the logarithm of a softmax in float32 or bfloat16, whose rounding can leave a
# probability of 1 this far above 0 in nats.
_ROUNDING = 1e-3
_NAMED = 5  # tokens named in a finding

Pass = Literal["sampled", "greedy", "prefill"]


@dataclass(frozen=True)
class BadToken:
    """A token without a usable log-probability: `position` in its completion, from 0."""

    position: int
    what: str
    missing: bool = False


def read_logprobs(values: Sequence[Any]) -> tuple[Array, list[BadToken]]:
    """Numbers in nats, shape [len(values)], with NaN for every value that `BadToken`s refuse."""
    numbers, bad = np.full(len(values), np.nan), []
    for position, value in enumerate(values):
        what = _fault(value)
        if what:
            bad.append(BadToken(position, what, missing=value is None))
        else:
            numbers[position] = value
    return numbers, bad


def _fault(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"not a number: {value!r:.40}"
    # An integer may be larger than any float, which math.isnan cannot take.
    if not abs(value) <= sys.float_info.max:
        return "NaN" if isinstance(value, float) and math.isnan(value) else "infinite"
    return f"{value:g}, above 0" if value > _ROUNDING else ""


class BadTokens:
    """A counter of refused tokens, which are not averaged; it keeps the names of the first."""

    def __init__(self) -> None:
        self._counts = {True: 0, False: 0}
        self._names: dict[bool, list[str]] = {True: [], False: []}

    def add(self, sample: int, tokens: Iterable[BadToken], of: Pass) -> None:
        """`of`: which of the server's answers for that sample."""
        for token in tokens:
            self._counts[token.missing] += 1
            names = self._names[token.missing]
            if len(names) < _NAMED:
                where = "" if of == "sampled" else f" ({of})"
                what = "" if token.missing else f": {token.what}"
                names.append(f"sample {sample} position {token.position}{where}{what}")

    def findings(self) -> list[Finding]:
        """A server with impossible values fails; missing ones are a warning."""
        found = []
        if self._counts[False]:
            found.append(
                Finding(
                    check="bad_logprobs",
                    status="fail",
                    scope="sample",
                    subject="tokens",
                    measured=f"{self._counts[False]} tokens refused, none averaged: "
                    + self._named(missing=False),
                    expected="finite numbers up to 0",
                    unit="nats",
                    blame="environment",
                    remedy="weights or kernels that overflow, or a server that sends other numbers",
                )
            )
        if self._counts[True]:
            found.append(
                Finding(
                    check="missing_logprobs",
                    status="warn",
                    scope="sample",
                    subject="tokens",
                    measured=f"{self._counts[True]} tokens without a log-probability: "
                    + self._named(missing=True),
                    expected="none",
                    blame="environment",
                )
            )
        return found

    def _named(self, *, missing: bool) -> str:
        names = self._names[missing]
        more = self._counts[missing] - len(names)
        return "; ".join(names) + (f"; and {more} more" if more else "")
