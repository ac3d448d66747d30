"""Signs of life out of a long load: whoever reads weights says so after each tensor.

How long a whole model takes to load depends on its size and the file system; how long one tensor
takes is what a watcher can judge. So the reader beats, and no thread beside it: one that hangs in
a read falls silent.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar


def _nobody_watches() -> None:
    """Outside of `beating`."""


_beat: ContextVar[Callable[[], None]] = ContextVar("beat", default=_nobody_watches)


@contextlib.contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` for every tensor that this thread loads meanwhile."""
    token = _beat.set(beat)
    try:
        yield
    finally:
        _beat.reset(token)


def loaded() -> None:
    """One more tensor is in memory."""
    _beat.get()()
