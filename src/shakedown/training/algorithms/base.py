"""An algorithm as the trainer sees it: one step at a time, everything else is common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shakedown.training.context import Context


@dataclass(frozen=True)
class StepResult:
    """The measurements of one step.

    Attributes:
        sums: this rank's shares, by metric; the sum over ranks is the metric.
        values: metrics that are the same on every rank.
    """

    sums: Mapping[str, float]
    values: Mapping[str, float] = field(default_factory=dict)


class Algorithm(Protocol):
    """One training algorithm on one rank. Every method is called on all ranks."""

    def __init__(self, context: Context) -> None:
        """Read what the algorithm needs.

        Raises:
            UsageError: the data cannot be used.
        """

    @property
    def max_answer_tokens(self) -> int:
        """How long an answer may become in an evaluation."""

    def begin(self, done: int) -> None:
        """Called once, after `done` steps were done by earlier attempts.

        Raises:
            ShakedownError: as `synchronise`.
        """

    def step(self, step: int) -> StepResult:
        """Do one step: fetch the batch, compute gradients, update.

        Raises:
            StopRequestedError: a stop was asked for while the batch was awaited.
        """

    def synchronise(self, step: int, /) -> float:
        """Hand the updated weights on, where anyone needs them; returns seconds.

        Raises:
            ShakedownError: on one rank alone, with all collectives done: the others hear of it.
        """

    def attach(self, folder: Path, step: int) -> None:
        """(rank 0 alone) Put what an attempt that goes on after `step` needs into a checkpoint.

        Raises:
            StorageError: it cannot be written.
        """

    def finish(self) -> None:
        """Called once, after the last step."""
