"""Faults to inject for drills, by name; imports without torch."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from shakedown.config import FaultConfig
from shakedown.errors import ConfigError, look_up

# Where a fault strikes: before a step's work, in the fetching of its batch, or in its logging.
Place = Literal["step", "data", "metrics"]


@dataclass(frozen=True)
class Fault:
    """`act` runs once, on one rank, at one step; `what` is for people."""

    place: Place
    what: str
    act: Callable[[], None]


class SwallowedError(Exception):
    """An error of one rank's step that the rank's own code catches and says nothing about."""


def conditional_collective() -> None:
    """One rank reduces a number for its log; the others know nothing of it."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def exception_in_cleanup() -> NoReturn:
    """The rank leaves its step silently and goes on to the barrier of the cleanup."""
    raise SwallowedError


def busy_rank() -> None:
    """Endless work in Python: the rank holds the interpreter and joins no collective."""
    count = 0
    while True:
        count = (count + 1) % 1_000_003


def stop_rank() -> None:
    """The process stops itself, as a frozen node or a debugger would."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_rank() -> None:
    """The process dies without a word, as when the kernel is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def dataloader() -> None:
    """The batch of this rank never comes."""
    while True:
        time.sleep(3600)


KINDS: dict[str, Fault] = {
    "conditional_collective": Fault(
        "metrics", "an extra all_reduce on one rank", conditional_collective
    ),
    "exception_in_cleanup": Fault(
        "step",
        "an exception swallowed on one rank, which waits in the cleanup's barrier",
        exception_in_cleanup,
    ),
    "busy_rank": Fault("step", "endless Python work on one rank", busy_rank),
    "stop_rank": Fault("step", "one rank stopped by SIGSTOP", stop_rank),
    "kill_rank": Fault("step", "one rank killed by SIGKILL", kill_rank),
    "dataloader": Fault("data", "one rank's data iterator sleeps for ever", dataloader),
}


def check_kind(kind: str) -> Fault:
    """Look a fault up.

    Raises:
        ConfigError: no such kind.
    """
    return look_up("fault kind", kind, KINDS, error=ConfigError)


class Injector:
    """Strikes at the configured rank, step and place; does nothing without a config.

    Raises:
        ConfigError: unknown kind.
    """

    def __init__(self, config: FaultConfig | None, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._fault = check_kind(config.kind) if config else None

    def at(self, place: Place, step: int) -> None:
        """Strike if this is the rank, the step and the place."""
        config, fault = self._config, self._fault
        if config is None or fault is None or fault.place != place:
            return
        if (config.rank, config.step) == (self._rank, step):
            print(f"drill: {config.kind} on rank {self._rank} at step {step}", flush=True)
            fault.act()
