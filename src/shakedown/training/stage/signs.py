"""Signs that a command moves, seen from outside: its steps, or its output and CPU time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.monitor.collect import proc
from shakedown.monitor.collect.logs import logs_in
from shakedown.monitor.heartbeat import host_name
from shakedown.processes.guard import Process
from shakedown.progress.signs import BUSY_SHARE, Beat, Phase
from shakedown.training.stage.progress import Progress

_WINDOW_SECONDS = 5.0
_SAY_SECONDS = 10.0
ROLE = "command"


@dataclass
class Signs:
    """The supervisor's view of a command; `steps`: how many there will be, None: not known.

    Once a step is known only steps are progress: ranks that wait in NCCL keep a core busy each, and
    a loop that only retries prints.
    """

    logs: Path
    progress: Progress | None
    steps: int | None
    _count: int = 0
    _bytes: int = -1
    _cpu: dict[int, float] = field(default_factory=dict)
    _looked: float = 0.0
    _said: float = 0.0

    @property
    def step(self) -> int:
        """The highest; 0 where none is known."""
        return self.progress.step if self.progress else 0

    def read(self) -> None:
        """Take the newest rows."""
        rows = self.progress.look() if self.progress else []
        now = time.monotonic()
        if rows and now - self._said >= _SAY_SECONDS:
            self._said = now
            of = f"/{self.steps}" if self.steps else ""
            loss = f", loss {rows[-1]['loss']:.4g}" if "loss" in rows[-1] else ""
            print(f"step {self.step}{of}{loss}", flush=True)

    def look(self, living: Sequence[Process]) -> Beat:
        """A beat of the whole command; it has no rank."""
        self.read()
        if not (self.progress and self.progress.rows):
            self._count += self._prints() or self._computes(living)
        return Beat(
            role=ROLE,
            rank=-1,
            pid=living[0].pid if living else 0,
            host=host_name(),
            phase=self._phase,
            # The highest would stand still in a second epoch that counts anew.
            step=self.progress.now if self.progress else 0,
            micro_batch=0,
            batch_size=0,
            count=self._count + (self.progress.source.changes if self.progress else 0),
            wall=round(time.time(), 3),
            monotonic=round(time.monotonic(), 3),
        )

    @property
    def _phase(self) -> Phase:
        if self.progress is None:
            return "train"
        if not self.progress.rows:
            return "init"
        # Behind the last step the result is written.
        return "checkpoint" if self.steps and self.step >= self.steps else "train"

    def _prints(self) -> bool:
        """Whether any log has grown."""
        total = 0
        try:
            for path in logs_in(self.logs):
                total += path.stat().st_size
        except OSError:  # a log that is being made, or a disk that is away: nothing is seen to move
            return False
        grown, self._bytes = total != self._bytes, total
        return grown

    def _computes(self, living: Sequence[Process]) -> bool:
        """Whether any process here was busy since the last look."""
        now = time.monotonic()
        seconds = now - self._looked
        if seconds < _WINDOW_SECONDS:
            return False
        before, self._cpu = self._cpu, {p.pid: proc.cpu(p.pid) for p in living}
        self._looked = now
        used = [value - before[pid] for pid, value in self._cpu.items() if pid in before]
        return any(each / seconds > BUSY_SHARE for each in used)
