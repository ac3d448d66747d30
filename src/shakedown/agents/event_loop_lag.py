"""Measure an event loop's lag, name the line that blocks it, and free it when it never ends.

A tick runs on the loop; a thread looks whether ticks still come. Code that blocks the loop (a
busy reward function, `requests`, `time.sleep`) stops every episode at once, and no asyncio timeout
can end it: a signal can, as it raises inside the blocking code.
"""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shakedown.agents.http_calls import CURRENT_EPISODE

TICK = 0.02  # seconds between ticks: the resolution of the measured lag
_LOOK = 0.1  # seconds between looks of the thread


class LoopBlockedError(BaseException):
    """Raised inside code that blocked the event loop for longer than an episode may take.

    Not an `Exception`, so that the agent's own `except Exception` does not swallow it.
    """


@dataclass
class LoopMonitor:
    """Lags of the event loop in seconds, and where it was blocked.

    Use as `async with LoopMonitor(limit=60) as monitor`. `blocked_at` maps `file:line in function`
    of the longest blocks to their seconds; `interrupted` counts blocks ended by a signal.
    """

    limit: float = 0.0
    lags: list[float] = field(default_factory=list)
    blocked_at: dict[str, float] = field(default_factory=dict)
    interrupted: int = 0

    async def __aenter__(self) -> "LoopMonitor":
        self._last = time.monotonic()
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._ticker = asyncio.create_task(self._tick())
        self._restore = self._install()
        self._thread = threading.Thread(target=self._watch, name="loop-monitor", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._stop.set()
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        self._thread.join()
        if self._restore is not None:
            signal.signal(signal.SIGALRM, self._restore)

    def _install(self) -> Any:
        """Only the main thread can take signals; elsewhere a block is named but not ended."""
        if self.limit <= 0 or threading.current_thread() is not threading.main_thread():
            return None
        return signal.signal(signal.SIGALRM, self._on_signal) or signal.SIG_DFL

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if CURRENT_EPISODE.get() is None:
            return  # the loop itself is at work: nothing of an agent to interrupt
        self.interrupted += 1
        raise LoopBlockedError(
            f"blocked the event loop for more than {self.limit:g} s at {_where(frame)}"
        )

    async def _tick(self) -> None:
        while True:
            self._last = time.monotonic()
            await asyncio.sleep(TICK)
            self.lags.append(max(0.0, time.monotonic() - self._last - TICK))

    def _watch(self) -> None:
        blocks_from = 0.0
        next_signal = self.limit
        while not self._stop.wait(_LOOK):
            last = self._last
            late = time.monotonic() - last - TICK
            if last != blocks_from:
                blocks_from, next_signal = last, self.limit
            # Shorter blocks may have ended before the frame below is read: it would name another.
            if late < 2 * _LOOK:
                continue
            frame = sys._current_frames().get(self._main)
            where = _where(frame)
            self.blocked_at[where] = max(late, self.blocked_at.get(where, 0.0))
            if self._restore is not None and late > next_signal:
                next_signal += 1.0  # again: an agent may catch the first one in a bare `except`
                signal.pthread_kill(self._main, signal.SIGALRM)


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile of `values`; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _where(frame: FrameType | None) -> str:
    """`file:line in function`, preferring the user's frames to libraries'."""
    frames = list(_frames(frame))
    package = str(Path(__file__).parents[1])
    own = [
        f
        for f in frames
        if not f.f_code.co_filename.startswith((package, "<frozen"))
        and "site-packages" not in f.f_code.co_filename
        and f"python{sys.version_info.major}." not in f.f_code.co_filename
    ]
    chosen = (own or frames)[:1]
    return "".join(f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}" for f in chosen)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
