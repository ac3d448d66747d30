"""What the parts of a trainer process share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shakedown.hang.heartbeat import NO_EXTENT, Heartbeat, Phase
from shakedown.training.coordination import Ranks
from shakedown.training.data.batch import TokenBatch, extent
from shakedown.training.engines.base import Engine, OnMicroBatch
from shakedown.training.faults import Injector
from shakedown.training.job import StageJob
from shakedown.training.observe.phases import Phases
from shakedown.training.stopping import StopFlag


class StopRequestedError(Exception):
    """Somebody asked to stop, and this is a place where nothing is half done."""


@dataclass
class Context:
    """One rank of one attempt.

    `step` is the step in work, counted from 1. `data` is the algorithm's place in its data, saved
    with a checkpoint and given back before `begin`; empty without one. `batch` is the global
    batch of the step in work, kept for a post-mortem.
    """

    job: StageJob
    engine: Engine
    ranks: Ranks
    heartbeat: Heartbeat
    faults: Injector
    stop: StopFlag = field(default_factory=StopFlag)
    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)
    batch: TokenBatch | None = None

    def beat(self, phase: Phase) -> None:
        """Tell the watcher where this rank is."""
        self.heartbeat.beat(phase=phase, step=self.step)

    def beat_training(self, parts: Sequence[TokenBatch]) -> OnMicroBatch:
        """What an engine calls as it trains on `parts`, this rank's micro batches."""
        given, ran, step, beat = extent(parts), NO_EXTENT, self.step, self.heartbeat.beat

        def on_micro_batch(index: int, run: Sequence[TokenBatch]) -> None:
            nonlocal ran
            if index == 0:
                ran = extent(run)
            rows = run[index].tokens.shape[0]
            beat(
                phase="train",
                step=step,
                micro_batch=index,
                batch_size=rows,
                given=given,
                run=ran,
            )

        return on_micro_batch

    def lead(self, key: str, decide: Callable[[], str], *, phase: Phase) -> str:
        """`Ranks.lead`, with heartbeats in `phase` on the ranks that wait."""
        self.beat(phase)
        return self.ranks.lead(key, decide, waiting=lambda: self.beat(phase))
