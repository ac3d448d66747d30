"""Watch a stage's components until they end, stand still, or the stage is told to stop."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from shakedown.cluster.supervise import Exit, Supervisor
from shakedown.core.paths import AttemptPaths
from shakedown.debug.paused_processes import describe, read_stops
from shakedown.progress.movement import Movement, Watch
from shakedown.report.logs import LogFollower
from shakedown.training.stage import stopping
from shakedown.training.stage.endings import Ending, interrupted, judge_exits, judge_stop
from shakedown.training.stage.launched import Launched

_POLL_SECONDS = 0.2
_WATCH_SECONDS = 1.0
_ECHO_SECONDS = 1.0
_SETTLE_SECONDS = 0.5  # peers of a dead rank fail within this: the kill is then told from the echo
# For a checkpoint after SIGTERM or SIGINT. Slurm's KillWait is 30 s when not set: the rest is for
# ending what hangs. SIGUSR2 sets no limit: it is followed by SIGTERM when the time is over.
SAVE_SECONDS = 60.0
SAVE_SECONDS_IN_SLURM = 20.0
_MAX_LINES = 20  # more lines per round are left to the log file
_MAX_CHARS = 300


class LogEcho:
    """Follow log files and print their new whole lines, each with its component's name."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        self._logs = logs
        self._follower = LogFollower()
        self._closed = False

    def show_new(self) -> None:
        """Print what was added since the last call; at most a few lines per component."""
        for name, path in self._logs.items():
            lines = [line for line in self._follower.new_lines(path) if line]
            if len(lines) > _MAX_LINES:
                lines = [*lines[:2], f"... {len(lines) - 4} lines, see {path}", *lines[-2:]]
            for line in lines:
                self.say(f"[{name}] {line[:_MAX_CHARS]}")

    def say(self, line: str) -> None:
        """Print a line; without a terminal that went away: the run matters more than its echo."""
        if self._closed:
            return
        try:
            print(line, flush=True)
        except (BrokenPipeError, OSError):
            self._closed = True
            sys.stdout = None  # or Python's own flush at exit fails on the same pipe


@dataclass
class StopSignals:
    """Set by a signal handler; the loop looks at it. `deadline` is monotonic seconds."""

    reason: str = ""
    deadline: float = math.inf

    def note(self, number: int) -> None:
        """Take a signal: the first one is the reason, the first but SIGUSR2 starts the clock."""
        self.reason = self.reason or f"stopped by {signal.Signals(number).name}"
        if number != signal.SIGUSR2 and self.deadline == math.inf:
            by_slurm = number == signal.SIGTERM and "SLURM_JOB_ID" in os.environ
            seconds = SAVE_SECONDS_IN_SLURM if by_slurm else SAVE_SECONDS
            self.deadline = time.monotonic() + seconds


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """SIGTERM, SIGINT and SIGUSR2 (Slurm's warning before the time limit) ask for a clean stop."""
    flag = StopSignals()

    def note(number: int, _frame: FrameType | None) -> None:
        flag.note(number)

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Monitor:
    """`on_stall` collects evidence while the stalled processes still live.

    While a debugger holds a process of the stage nothing stalls, and a component that failed is not
    yet judged: its siblings, and who debugs them, would be ended with it.
    """

    supervisor: Supervisor
    launched: Launched
    watch: Watch
    echo: LogEcho
    stop: StopSignals
    on_stall: Callable[[Movement], None]
    exits: list[Exit] = field(default_factory=list)
    movement: Movement | None = None
    held: tuple[str, ...] = ()  # processes that wait for a debugger
    _asked: bool = False  # the ranks to save and stop

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
        if self.stop.reason and not self._asked:
            self._ask_to_stop()
        if watch_too:
            self._look_for_debuggers()
        ending = self._judge()
        if ending is not None and ending.state == "failed" and self.held:
            return None
        if ending is not None and ending.state in ("failed", "interrupted"):
            time.sleep(_SETTLE_SECONDS)
            if self.stop.reason and not self._asked:
                return None  # Slurm's signal reached the component before this process
            if ending.state == "failed":
                self.launched.note_failure()
            return self._judge()  # a kill that was seen meanwhile outranks the error it caused
        if ending is None and now >= self.stop.deadline:
            return interrupted(self.exits, self.supervisor.running(), self.stop.reason)
        # While the ranks save, a rank that stands still is not looked for: the deadline ends it.
        if ending is not None or not watch_too or self.stop.deadline < math.inf:
            return ending
        return self._stall(now)

    def _judge(self) -> Ending | None:
        self.exits += self.supervisor.poll()
        running = self.supervisor.running()
        if self._asked:
            done = self.launched.reached_end
            return judge_stop(self.exits, running, self.stop.reason, done=done)
        return judge_exits(self.exits, running)

    def _look_for_debuggers(self) -> None:
        stops = [describe(stop) for stop in read_stops(self.attempt.debug)]
        for text in stops:
            if text not in self.held:
                self.echo.say(f"{text}; no time-out runs; next: shakedown debug attach")
        if self.held and not stops:
            self.echo.say("no process is waiting for a debugger any more")
        self.held = tuple(stops)

    def _stall(self, now: float) -> Ending | None:
        if self.held:
            self.watch.hold(now)
            return None
        self.movement = self.watch.observe(self.launched.beats(self.supervisor), now)
        if self.movement.state != "still":
            return None
        self.on_stall(self.movement)
        return Ending("hung", self.movement.sentence, self.movement.still[0].name)

    @property
    def attempt(self) -> AttemptPaths:
        return self.launched.job.attempt

    def _ask_to_stop(self) -> None:
        """Ask by the file that all nodes see, and by a signal to the ranks of this node."""
        self._asked = True
        self.echo.say(f"{self.stop.reason}: saving the state")
        try:
            stopping.ask(self.attempt.stop, self.stop.reason)
        except OSError as error:  # a full disk; the signal is still worth sending
            self.echo.say(f"cannot write {self.attempt.stop}: {error.strerror}")
        self.launched.ask_ranks(self.supervisor)
