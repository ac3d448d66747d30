"""Watch a stage's components until they end, stand still, or the stage is told to stop."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from shakedown.cluster.supervise import Exit, Supervisor
from shakedown.hang.heartbeat import read_heartbeats
from shakedown.hang.watch import Health, Watch
from shakedown.paths import AttemptPaths
from shakedown.training.echo import LogEcho
from shakedown.training.endings import Ending, interrupted, judge_exits

_POLL_SECONDS = 0.2
_WATCH_SECONDS = 1.0
_ECHO_SECONDS = 1.0
_SETTLE_SECONDS = 0.5  # peers of a dead rank fail within this: the kill is then told from the echo
SAVE_SECONDS = 60.0  # for a checkpoint after a signal; Slurm's own grace time ends it sooner


@dataclass
class StopFlag:
    """Set by a signal handler; the loop looks at it."""

    reason: str = ""


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """SIGTERM, SIGINT and SIGUSR2 (Slurm's warning before the time limit) ask for a clean stop."""
    flag = StopFlag()

    def note(number: int, _frame: FrameType | None) -> None:
        flag.reason = f"stopped by {signal.Signals(number).name}"

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Monitor:
    """`on_stall` collects evidence while the stalled processes still live."""

    supervisor: Supervisor
    attempt: AttemptPaths
    watch: Watch
    echo: LogEcho
    stop: StopFlag
    on_stall: Callable[[Health], None]
    exits: list[Exit] = field(default_factory=list)
    health: Health | None = None

    def run(self) -> Ending:
        """Return how the stage ended; components may still run then, the caller ends them."""
        next_watch = next_echo = 0.0
        while True:
            now = time.monotonic()
            if now >= next_echo:
                self.echo.show_new()
                next_echo = now + _ECHO_SECONDS
            ending = self._look(now >= next_watch, now)
            if now >= next_watch:
                next_watch = now + _WATCH_SECONDS
            if ending is not None:
                self.echo.show_new()
                return ending
            time.sleep(_POLL_SECONDS)

    def _look(self, watch_too: bool, now: float) -> Ending | None:
        if self.stop.reason:
            return self._stop_and_save()
        self.exits += self.supervisor.poll()
        ending = judge_exits(self.exits, self.supervisor.running())
        if ending is not None and ending.state == "failed":
            time.sleep(_SETTLE_SECONDS)
            self.exits += self.supervisor.poll()
            return judge_exits(self.exits, self.supervisor.running())
        if ending is not None or not watch_too:
            return ending
        return self._stall(now)

    def _stall(self, now: float) -> Ending | None:
        self.health = self.watch.observe(read_heartbeats(self.attempt.heartbeats), now)
        if self.health.state != "stalled":
            return None
        self.on_stall(self.health)
        return Ending("hung", self.health.sentence, self.health.still[0].name)

    def _stop_and_save(self) -> Ending:
        """Pass the signal on to the trainers, which save and exit; then everything ends."""
        print(f"{self.stop.reason}: saving the state", flush=True)
        for name in self.supervisor.running():
            if name.startswith("trainer"):
                self.supervisor.signal(name, signal.SIGTERM)
        deadline = time.monotonic() + SAVE_SECONDS
        while time.monotonic() < deadline and self._trainers_run():
            self.exits += self.supervisor.poll()
            time.sleep(_POLL_SECONDS)
        self.exits += self.supervisor.poll()
        return interrupted(self.exits, self.stop.reason)

    def _trainers_run(self) -> bool:
        return any(name.startswith("trainer") for name in self.supervisor.running())
