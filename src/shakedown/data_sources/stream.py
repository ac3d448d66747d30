"""An endless stream of rows in a seeded order, read one by one, whose position can be restored.

The order of an epoch is a permutation of all rows, whatever the size of the data set: neighbours in
a sorted file are not neighbours in an epoch. Memory holds eight bytes per row, and the first rows
in prepared form.

Every rank reads the same stream and takes its share of the same global batch, and epochs follow
without a gap: no batch is ever short, so no rank ever has fewer batches than another.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shakedown.core.errors import UsageError
from shakedown.core.files import is_count
from shakedown.data_sources.conversations import Conversation, conversation_of
from shakedown.data_sources.indexed import IndexedRows

Item = TypeVar("Item")

KEPT = 16_384  # rows kept prepared in memory; about 30 MB of text at 2 kB per row


# Called once per row of a batch, which may extend past the end of an epoch into a second order.
@functools.lru_cache(maxsize=4)
def epoch_order(size: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The shuffled row numbers of one epoch, shape [size]; another order in every epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)


def step_indices(size: int, *, seed: int, step: int, batch_size: int) -> list[int]:
    """Row numbers of the global batch of a step (counted from 1), epochs joined end to end.

    Independent of the number of ranks: each takes its share of the same batch.
    """
    first = (step - 1) * batch_size
    places = (divmod(position, size) for position in range(first, first + batch_size))
    return [int(epoch_order(size, seed=seed, epoch=epoch)[row]) for epoch, row in places]


@dataclass(frozen=True)
class StreamPosition:
    """The position of the next row: number `index` in the shuffled order of `epoch`, both from 0.

    `rows`: the size of the data set, without which the order means nothing.
    """

    seed: int
    rows: int
    epoch: int = 0
    index: int = 0

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)


class RowStream(Generic[Item]):
    """Prepared rows of a source, epoch after epoch.

    Args:
        source: as `iter_conversations`.
        prepare: converts a row; None leaves it out.
        seed: the seed of the order.
        kept: the number of first rows that are prepared at the start and stay in memory.

    `left_out` counts the rows read so far that `prepare` left out.

    Raises:
        UsageError, CannotJudgeError: as `iter_conversations`, also from `take`; no row is left.
    """

    def __init__(
        self,
        source: str,
        prepare: Callable[[Conversation], Item | None],
        *,
        seed: int,
        kept: int = KEPT,
    ) -> None:
        self._source, self._prepare = source, prepare
        self._rows = IndexedRows(source)
        self._position = StreamPosition(seed, len(self._rows))
        self.left_out = 0
        self._first = [self._read(number) for number in range(min(kept, len(self._rows)))]

    @property
    def position(self) -> StreamPosition:
        """The position of the next row."""
        return self._position

    @property
    def first(self) -> list[Item]:
        """The items in memory, in the order of the source."""
        return [item for item in self._first if item is not None]

    def seek(self, saved: Mapping[str, int]) -> None:
        """Go to a position of `to_json`.

        Raises:
            UsageError: it is invalid, or of other data.
        """
        try:
            position = StreamPosition(**self._translated(saved))
        except TypeError as error:
            raise UsageError(f"{self._source}: {saved} is not a position in data") from error
        if not position.rows or not all(map(is_count, position.to_json().values())):
            raise UsageError(f"{self._source}: {saved} is not a position in data")
        if position.rows != len(self._rows) or position.index > position.rows:
            raise UsageError(
                f"{self._source} has {len(self._rows)} rows: position {saved} is from other data"
            )
        self._position = position

    def _translated(self, saved: Mapping[str, int]) -> Mapping[str, int]:
        """A position from releases that shuffled windows, if one window covered all rows: the order
        is the same.
        """
        size = len(self._rows)
        whole = saved.get("window") == 0 and size < saved.get("rows", 0) and size == len(self.first)
        if "window" not in saved or not whole:
            return saved
        return {**{key: saved[key] for key in saved if key != "window"}, "rows": size}

    def take(self, count: int) -> list[Item]:
        """The next items, across the ends of epochs."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Item:
        for _ in range(2 * len(self._rows)):  # more than any epoch has, from any position
            item = self._advance()
            if item is not None:
                return item
        raise UsageError(f"{self._source}: none of the {len(self._rows)} rows can be used")

    def _advance(self) -> Item | None:
        at = self._position
        if at.index >= at.rows:
            at = StreamPosition(at.seed, at.rows, at.epoch + 1)
        number = int(epoch_order(at.rows, seed=at.seed, epoch=at.epoch)[at.index])
        self._position = StreamPosition(at.seed, at.rows, at.epoch, at.index + 1)
        return self._first[number] if number < len(self._first) else self._read(number)

    def _read(self, number: int) -> Item | None:
        place, body = self._rows[number]
        item = self._prepare(conversation_of(body, place))
        self.left_out += item is None
        return item
