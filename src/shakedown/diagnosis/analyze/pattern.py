"""Does a rank do what its own earlier steps did? A training step repeats the same collectives.

At the point where ranks differ, the one that departs from its own history took the branch; a
majority proves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shakedown.diagnosis.analyze.classes import path_key
from shakedown.diagnosis.records import FlightRecord, Operation

Token = tuple[object, ...]

# Longest context compared, in collectives: more than one step of a deep model.
CONTEXT = 64


@dataclass(frozen=True)
class Departure:
    """How a call fits its rank's history: 0 as before, 2 another order, 3 never seen before.

    `known` is False when the history is too short to say.
    """

    score: int
    known: bool


def token(op: Operation, *, frames: bool = True) -> Token:
    """What makes two calls the same: group, operation, sizes, dtypes, and the code line."""
    where = path_key(op.frames) if frames else ()
    return (op.group, op.name, op.sizes, op.output_sizes, op.dtypes, op.p2p, where)


def departure(record: FlightRecord, op: Operation) -> Departure:
    """Judge `op` against the calls before it in the same dump."""
    return _departure(_Call(record.operations, op))


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a dump, by identity: ranks with equal dumps share both."""

    operations: Sequence[Operation]
    op: Operation

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Call):
            return NotImplemented
        return self.operations is other.operations and self.op is other.op

    def __hash__(self) -> int:
        return hash((id(self.operations), id(self.op)))


# Few: ranks with equal dumps are judged one after the other, and an entry holds a whole dump.
@lru_cache(16)
def _departure(call: _Call) -> Departure:
    ordered = sorted(call.operations, key=lambda o: o.order)
    index = next((i for i, o in enumerate(ordered) if o is call.op), len(ordered))
    tokens = [token(o) for o in ordered[: index + 1]]
    return judge(tokens)


def judge(tokens: Sequence[Token]) -> Departure:
    """The last token against those before it.

    The longest suffix of the history that occurred before predicts the next token; a call
    that never followed that context departs.
    """
    *history, last = tokens
    # No call came twice: there is no earlier step to compare with.
    if len(history) < 2 or len(set(history)) == len(history):
        return Departure(3 if last not in history else 0, known=False)
    if last not in history:
        return Departure(3, known=True)
    best, predicted = 0, set[Token]()
    for end in range(1, len(history)):
        length = _common_suffix(history, end)
        if length > best:
            best, predicted = length, {history[end]}
        # Contexts of one length may have gone on in several ways: all of these are usual.
        elif length == best and length:
            predicted.add(history[end])
    if not best:
        return Departure(0, known=False)
    return Departure(0 if last in predicted else 2, known=True)


def _common_suffix(history: Sequence[Token], end: int) -> int:
    """How many tokens before `end` equal those at the end of the history."""
    length, limit = 0, min(end, CONTEXT)
    while length < limit and history[end - 1 - length] == history[-1 - length]:
        length += 1
    return length
