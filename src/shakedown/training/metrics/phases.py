"""Time of a step by phase: a stop watch with one hand, which each phase takes over in turn."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Lap:
    """Wall time between two calls of `Phases.take`, in seconds; `phases` hold a part of it."""

    seconds: float
    phases: Mapping[str, float]


class Phases:
    """Charges wall time to phases by name; for one thread.

    A phase inside another one stops the outer one, so no second is counted twice and the phases
    never add up to more than the lap. On GPUs a phase ends when its results are on the host.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._mark = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Charge the block to the phase `name`."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def follow(self, target: object, **methods: str) -> None:
        """Charge every call of these methods of `target` to the phases that are given by name.

        Algorithms call an engine in their own ways and orders; this catches all of them.
        """
        for method, phase in methods.items():
            setattr(target, method, self._timed(phase, getattr(target, method)))

    def take(self) -> Lap:
        """The lap since the last call; begins anew."""
        self._charge()
        lap = Lap(self._mark - self._began, self._seconds)
        self._began, self._seconds = self._mark, {}
        return lap

    def _timed(self, phase: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def timed(*args: _P.args, **keywords: _P.kwargs) -> _R:
            with self(phase):
                return function(*args, **keywords)

        return timed

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
