"""What the parts of a trainer process share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shakedown.hang.heartbeat import Heartbeat, Phase
from shakedown.training.coordination import Ranks
from shakedown.training.data.batch import TokenBatch
from shakedown.training.engines.base import Engine
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

    def beat(self, phase: Phase, *, micro_batch: int = 0, batch_size: int = 0) -> None:
        """Tell the watcher where this rank is."""
        self.heartbeat.beat(
            phase=phase, step=self.step, micro_batch=micro_batch, batch_size=batch_size
        )

    def lead(self, key: str, decide: Callable[[], str], *, phase: Phase) -> str:
        """`Ranks.lead`, with heartbeats in `phase` on the ranks that wait."""
        self.beat(phase)
        return self.ranks.lead(key, decide, waiting=lambda: self.beat(phase))
