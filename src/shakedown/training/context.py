"""The context that the parts of a trainer process share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shakedown.monitor.heartbeat import NO_EXTENT, Heartbeat
from shakedown.profiling.capture import Capture
from shakedown.progress.signs import Phase
from shakedown.training.batch import TokenBatch, extent
from shakedown.training.coordination import Ranks
from shakedown.training.engines.base import OnMicroBatch, TrainEngine
from shakedown.training.faults import Injector
from shakedown.training.metrics.phases import Phases
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.stopping import StopFlag


class StopRequestedError(Exception):
    """A stop was requested, and this is a point where nothing is half done."""


@dataclass
class Context:
    """One rank of one attempt.

    `step` is the step in work, counted from 1. `data` is the algorithm's place in its data, saved
    with a checkpoint and given back before `begin`; empty without one. `batch` is the global
    batch of the step in work, kept for the NaN guard. `capture` profiles this rank where that is
    asked for.
    """

    job: StageJob
    engine: TrainEngine
    ranks: Ranks
    heartbeat: Heartbeat
    faults: Injector
    stop: StopFlag = field(default_factory=StopFlag)
    step: int = 0
    data: dict[str, int] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)
    batch: TokenBatch | None = None
    capture: Capture = field(default_factory=lambda: Capture(None))

    def beat(self, phase: Phase) -> None:
        """Report to the watcher where this rank is."""
        self.heartbeat.beat(phase=phase, step=self.step)

    def profile(self, step: int | None) -> None:
        """Step `step` begins where this rank is profiled; None: the last one is over."""
        if self.capture.recording:
            self.beat("checkpoint")  # a trace is long in writing, which this phase may be
        if step is None:
            self.capture.close()
        else:
            self.capture.step(step)

    def beat_training(self, parts: Sequence[TokenBatch]) -> OnMicroBatch:
        """The callback of an engine that trains on `parts`, this rank's micro batches."""
        # A heartbeat holds both shapes: what the data made, and what the engine was called with.
        # By them the hang diagnosis finds a rank that departed from its data (`rules_batches`).
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

    def broadcast_from_rank0(self, key: str, decide: Callable[[], str], *, phase: Phase) -> str:
        """`Ranks.broadcast_from_rank0`, with heartbeats in `phase` on the ranks that wait."""
        self.beat(phase)
        return self.ranks.broadcast_from_rank0(key, decide, waiting=lambda: self.beat(phase))
