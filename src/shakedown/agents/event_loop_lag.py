"""Measure an event loop's lag, name the line that blocks it, and free it when it never ends.

A tick runs on the loop; a thread looks whether ticks still come. Code that blocks the loop (a
busy reward function, `requests`, `time.sleep`) stops every episode at once, and no asyncio timeout
can end it: a signal can, as it raises inside the blocking code.

On a busy machine a loop is also late because its thread waits for a CPU. That is the machine's, and
told apart from the loop's own: Linux counts for each thread the time for which it could run and had
no CPU (Documentation/scheduler/sched-stats.rst).
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from shakedown.agents.endpoint import EPISODE_KEY
from shakedown.stacks.frames import owner_of

# Seconds between ticks: the resolution of the measured lag. Each wake-up costs 0.1 ms and more.
TICK = 0.05
_LOOK = 0.1  # seconds between looks of the thread: half of the shortest block that is named


class LoopBlockedError(BaseException):
    """Raised inside code that blocked the event loop for longer than an episode may take.

    Not an `Exception`, so that the agent's own `except Exception` does not swallow it.
    """


class CpuWait:
    """The time that a thread has waited for a CPU; a process is its main thread here."""

    def __init__(self, thread: int) -> None:
        # Kept open: an agent may use up all descriptors.
        try:
            self._file = os.open(f"/proc/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """The wait since the thread began; always 0 where the kernel does not count it."""
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, LookupError, ValueError):
            return 0.0

    def close(self) -> None:
        """Close the file; `seconds` is 0 from here on."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@dataclass
class LoopMonitor:
    """Lags of the event loop in seconds, and where it was blocked.

    `lags` are without the time for which the loop waited for a CPU; `cpu_wait` is the longest of
    those, in seconds. `limit`: seconds, without such waits, after which a block is ended.
    `blocked_at` maps `file:line in function` of the longest blocks to their seconds. `held`:
    whether a debugger may hold the process: then nothing of an agent blocks it, and nothing is
    measured.
    """

    limit: float
    lags: list[float] = field(default_factory=list)
    cpu_wait: float = 0.0
    blocked_at: dict[str, float] = field(default_factory=dict)
    held: Callable[[], bool] = lambda: False

    def start(self) -> None:
        """Watch the running loop for as long as the process lives.

        In the main thread: no other one can take signals.
        """
        self._cpu = CpuWait(threading.get_native_id())
        self._last = time.monotonic(), self._cpu.seconds()
        self._ticker = asyncio.create_task(self._tick())
        signal.signal(signal.SIGALRM, self._on_signal)
        watched = threading.get_ident()
        threading.Thread(target=self._watch, args=(watched,), daemon=True).start()

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if not EPISODE_KEY.get():
            return  # the loop itself is at work: nothing of an agent to interrupt
        raise LoopBlockedError(
            f"blocked the event loop for more than {self.limit:g} s at {place_of(frame)}"
        )

    async def _tick(self) -> None:
        while True:
            self._last = time.monotonic(), self._cpu.seconds()
            await asyncio.sleep(TICK)
            if not self.held():
                late, wait = self._since(self._last)
                self.lags.append(max(0.0, late - wait))
                self.cpu_wait = max(self.cpu_wait, min(late, wait))

    def _since(self, last: tuple[float, float]) -> tuple[float, float]:
        """Seconds by which the loop is late since a tick, and for which it waited for a CPU."""
        began, waited = last
        return time.monotonic() - began - TICK, self._cpu.seconds() - waited

    def _watch(self, watched: int) -> None:
        blocks_from = 0.0
        next_signal = self.limit
        while True:
            time.sleep(_LOOK)
            last = self._last
            late, wait = self._since(last)
            if last[0] != blocks_from:
                blocks_from, next_signal = last[0], self.limit
            # Shorter blocks may have ended before the frame below is read: it would name another.
            if late - wait < 2 * _LOOK or self.held():
                continue
            where = place_of(sys._current_frames().get(watched))
            self.blocked_at[where] = max(late - wait, self.blocked_at.get(where, 0.0))
            if late - wait > next_signal:
                next_signal += 1.0  # again: an agent may catch the first one in a bare `except`
                signal.pthread_kill(watched, signal.SIGALRM)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of `values`; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def place_of(frame: FrameType | None) -> str:
    """`file:line in function`, preferring the user's frames to libraries'."""
    frames = list(_frames(frame))
    own = [f for f in frames if owner_of(f.f_code.co_filename) == "user"]
    chosen = (own or frames)[:1]
    return "".join(f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}" for f in chosen)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
