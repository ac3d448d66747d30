"""Which rows a step sees: a pure function of the seed, so the position is just the step."""

import functools

import numpy as np
import numpy.typing as npt


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
