"""Patience with a controller or a database that is down, busy or restarting."""

import time
from collections.abc import Callable
from typing import TypeVar

from submitit.core.utils import FailedJobError, FailedSubmissionError

from snakemake_executor_plugin_submitit.slurm import SlurmError

_T = TypeVar("_T")

# Slurm's words for a controller or database that is busy, restarting or out of reach, or for a
# full queue.
_TRANSIENT = (
    "unable to contact slurm controller",
    "slurm controller not responding",
    "temporarily unable to accept job",
    "resource temporarily unavailable",
    "standby mode",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unexpected message received",
    "maxsubmitjob",
    "grpsubmitjob",
    "does not answer",
    "problem talking to the database",
    "slurmdbd",
)
_FIRST_DELAY, _LONGEST_DELAY = 2.0, 60.0


class GaveUpError(RuntimeError):
    """A lasting refusal, or no answer for longer than the patience; the message has its words."""

    def __init__(self, words: str, *, lasting: bool) -> None:
        super().__init__(words)
        self.lasting = lasting


def is_transient(message: str) -> bool:
    """Whether Slurm's words say that the same request may succeed later."""
    return any(words in message.lower() for words in _TRANSIENT)


def with_patience(
    attempt: Callable[[], _T],
    *,
    patience: float,
    on_retry: Callable[[str, float], None],
    clean_up: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> _T:
    """Call `attempt` until it succeeds, with growing pauses, for `patience` seconds at most.

    Before each further attempt `clean_up` runs: a call that timed out may have come through.
    `on_retry` is told the error's words and the pause in seconds.

    Raises:
        GaveUpError: a lasting refusal, or the patience is over.
    """
    deadline = clock() + patience
    delay = _FIRST_DELAY
    again = False
    while True:
        try:
            if again:
                clean_up()
            return attempt()
        except (FailedJobError, FailedSubmissionError, SlurmError, OSError, RuntimeError) as error:
            words = str(error).strip() or type(error).__name__
            left = deadline - clock()
            if not is_transient(words):
                raise GaveUpError(words, lasting=True) from error
            if left <= 0:
                raise GaveUpError(words, lasting=False) from error
        # The last attempt is made when the patience ends, not a pause before it.
        pause = min(delay, left)
        on_retry(words, pause)
        sleep(pause)
        delay = min(delay * 2, _LONGEST_DELAY)
        again = True
