"""Rows without end in a seeded order, a window of them in memory; stands where it was left.

The rows of an epoch are read in windows of consecutive rows, and each window is shuffled by seed,
epoch and its number. A data set that fits in one window is read once and shuffled whole.

Every rank reads the same stream and takes its share of the same global batch, and epochs are
joined end to end: no batch is ever short, so no rank ever has fewer batches than another.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shakedown.core.errors import UsageError
from shakedown.core.files import is_count
from shakedown.data_sources.conversations import Conversation, iter_conversations

Item = TypeVar("Item")

WINDOW = 16_384  # rows; about 30 MB of text at 2 kB a row


# Asked once a row of a batch, which may reach over the end of an epoch into a second order.
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
    """The next item: number `index` in the shuffled window `window` of `epoch`, all from 0.

    `rows`: the window's size in rows, without which its number says nothing.
    """

    seed: int
    rows: int
    epoch: int = 0
    window: int = 0
    index: int = 0

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)


class RowStream(Generic[Item]):
    """Prepared rows of a source, epoch after epoch.

    Args:
        source: as `iter_conversations`.
        prepare: what becomes of a row; None leaves it out.
        seed: of the order.
        rows: how many are read, prepared and shuffled at a time.

    `left_out` counts the rows that `prepare` left out of what was read so far.

    Raises:
        UsageError, BlockedError: as `iter_conversations`, also from `take`; no row is left.
    """

    def __init__(
        self,
        source: str,
        prepare: Callable[[Conversation], Item | None],
        *,
        seed: int,
        rows: int = WINDOW,
    ) -> None:
        self._source, self._prepare = source, prepare
        self._position = StreamPosition(seed, rows)
        self.left_out = 0
        self._reader: Iterator[Conversation] = iter(())
        self._items: list[Item] = []
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._whole = self._ended = False
        self._found = 0
        self._open(self._position)

    @property
    def position(self) -> StreamPosition:
        """Where the next item stands."""
        return self._position

    @property
    def window(self) -> list[Item]:
        """The items in memory, in the order of the source."""
        return self._items

    def seek(self, saved: Mapping[str, int]) -> None:
        """Go to a position of `to_json`.

        Raises:
            UsageError: it is none, or is beyond the data; the data set is another one.
        """
        try:
            position = StreamPosition(**saved)
        except TypeError as error:
            raise UsageError(f"{self._source}: {saved} is no position in data") from error
        if not position.rows or not all(map(is_count, position.to_json().values())):
            raise UsageError(f"{self._source}: {saved} is no position in data")
        self._open(position)
        if position.index > len(self._items) or not self._items:
            raise UsageError(f"{self._source} ends before the position {saved}")
        self._position = position

    def take(self, count: int) -> list[Item]:
        """The next items, over the ends of windows and epochs."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Item:
        while self._position.index >= len(self._items):
            self._advance()
        at = self._position
        self._position = StreamPosition(at.seed, at.rows, at.epoch, at.window, at.index + 1)
        return self._items[int(self._order[at.index])]

    def _advance(self) -> None:
        """Go to the beginning of the next window, or of the next epoch."""
        at = self._position
        if self._ended and not self._found:
            raise UsageError(f"{self._source}: no row is left of {self.left_out} rows")
        if not self._ended:
            self._position = StreamPosition(at.seed, at.rows, at.epoch, at.window + 1)
            self._load()
        elif self._whole:
            # All of the data is in memory: shuffled anew, not read again.
            self._position = StreamPosition(at.seed, at.rows, at.epoch + 1)
            self._shuffle()
        else:
            self._open(StreamPosition(at.seed, at.rows, at.epoch + 1))

    def _open(self, position: StreamPosition) -> None:
        """Read an epoch from the beginning of a window on."""
        self._position = StreamPosition(
            position.seed, position.rows, position.epoch, position.window
        )
        skipped = position.window * position.rows
        # Skipped by reading: neither JSON lines nor a streamed data set has an index of its rows.
        self._reader = itertools.islice(iter_conversations(self._source), skipped, None)
        self._found = 0
        self._load()

    def _load(self) -> None:
        read = list(itertools.islice(self._reader, self._position.rows))
        self._ended = len(read) < self._position.rows
        self._whole = self._ended and self._position.window == 0
        prepared = [self._prepare(row) for row in read]
        self._items = [item for item in prepared if item is not None]
        self.left_out += len(read) - len(self._items)
        self._found += len(self._items)
        self._shuffle()

    def _shuffle(self) -> None:
        at, size = self._position, len(self._items)
        # As `epoch_order` has it: a data set in one window is drawn in the order of `step_indices`.
        if at.window == 0:
            self._order = epoch_order(size, seed=at.seed, epoch=at.epoch)
        else:
            self._order = np.random.default_rng([at.seed, at.epoch, at.window]).permutation(size)
