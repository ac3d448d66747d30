"""Runs groups of episodes at once, as many as staleness allows, and hands them out in batches.

Groups come out oldest first, and a batch is held back while it would leave more behind than can be
used in time. A group that fails is counted by its cause and never loses another one. Everything
happens on one event loop.
"""

import asyncio
import bisect
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, NamedTuple, Self, TypeVar

from shakedown.core.errors import CannotJudgeError, ConfigError
from shakedown.rollout.staleness import Staleness, explain

DataT = TypeVar("DataT")
GroupT = TypeVar("GroupT")
_LOG = logging.getLogger(__name__)


class _Start(NamedTuple):
    """The order in which groups are used: by the version current at their start, then by turn.

    Tokens of a group are of that version or newer.
    """

    version: int
    turn: int


class RolloutController(Generic[DataT, GroupT]):
    """Starts `run_group(data)` for submitted data while there is capacity.

    Args:
        run_group: runs all episodes of one group; its error counts as that group's failure. None:
            the group is not wanted.
        max_concurrent: groups in flight at most.
        max_head_offpolicyness: see `Staleness`.
        batch_size: groups that `next_batch` returns and one update consumes.
        source: drawn from when nothing submitted is left; endless or not.
        total: groups wanted in all; failed and unwanted ones are replaced from the source.
        accepted: of those, groups that were made and handed out before, in whole batches.

    `held_seconds`: how long the last batch was held back, complete, for groups in flight that were
    due in it.

    Raises:
        ConfigError: with these settings not even one batch could ever be complete.
    """

    def __init__(
        self,
        run_group: Callable[[DataT], Awaitable[GroupT | None]],
        *,
        max_concurrent: int,
        max_head_offpolicyness: int,
        batch_size: int,
        source: Iterator[DataT] | None = None,
        total: int | None = None,
        accepted: int = 0,
    ) -> None:
        self._rule = Staleness(max_concurrent, max_head_offpolicyness, batch_size)
        trap = explain(self._rule, needed=batch_size)
        if trap:
            raise ConfigError(trap)
        self._run_group, self._source, self._total = run_group, source, total
        self._waiting: deque[DataT] = deque()
        self._running: dict[asyncio.Task[None], _Start] = {}
        self._ready: list[tuple[_Start, GroupT]] = []  # in order
        self._turns = itertools.count()
        self._changed = asyncio.Event()
        self._version, self._accepted, self._handed_out = 0, accepted, accepted
        self.held_seconds = 0.0
        self._paused = self._closed = False
        # A dead server fails every group at once: a source must not be emptied into it.
        self._failed_in_row, self._hopeless = 0, max_concurrent + batch_size
        self.failures: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def version(self) -> int:
        """Updates of the consumer so far."""
        return self._version

    @property
    def running(self) -> int:
        """Groups in flight."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Groups that are done and not yet handed out."""
        return len(self._ready)

    @property
    def accepted(self) -> int:
        """Groups that came to a good end, handed out or not."""
        return self._accepted

    @property
    def capacity(self) -> int:
        """Groups that staleness and concurrency let start now."""
        free = self._rule.capacity(
            version=self._version, running=self.running, accepted=self._accepted
        )
        if self._total is None:
            return free
        # Failed groups are not subtracted: others are drawn in their place.
        return min(free, self._total - self._accepted - self.running)

    def submit(self, data: DataT) -> None:
        """Queue a group; it starts when there is capacity."""
        self._waiting.append(data)
        self._start_more()

    def set_version(self, version: int) -> None:
        """The consumer made updates: older rollouts are used up, more may start.

        Raises:
            ValueError: the version went back.
        """
        if version < self._version:
            raise ValueError(f"version {version} after {self._version}")
        self._version = version
        self._start_more()

    def pause(self) -> None:
        """Start nothing new; what runs goes on."""
        self._paused = True

    def resume(self) -> None:
        """Start again what capacity allows."""
        self._paused = False
        self._start_more()

    async def drain(self, within: float) -> None:
        """Wait until nothing is in flight; call `pause` first.

        Raises:
            CannotJudgeError: groups were still in flight after `within` seconds.
        """
        try:
            async with asyncio.timeout(within):
                while self._running:
                    await self._change()
        except TimeoutError:
            raise CannotJudgeError(
                f"{self.running} groups were still in flight after {within:.0f} s; {self._state()}"
            ) from None

    async def next_batch(self, timeout: float | None = None) -> list[GroupT]:  # noqa: ASYNC109
        """The next `batch_size` groups, oldest first.

        Raises:
            CannotJudgeError: not complete within `timeout` seconds (None: no limit), or it can
                never be; nothing that is ready is lost.
        """
        self._start_more()
        size, complete = self._rule.batch_size, None
        try:
            async with asyncio.timeout(timeout):
                while len(self._ready) < size or not self._rest_in_time():
                    if self._exhausted():
                        raise CannotJudgeError(
                            f"no batch of {size} can be complete: {self._state()}"
                        )
                    if complete is None and len(self._ready) >= size:
                        complete = time.monotonic()
                    await self._change()
        except TimeoutError:
            raise CannotJudgeError(
                f"no batch of {size} groups within {timeout:.0f} s: {self._state()}"
            ) from None
        self.held_seconds = 0.0 if complete is None else time.monotonic() - complete
        self._handed_out += size
        batch, self._ready = self._ready[:size], self._ready[size:]
        return [group for _, group in batch]

    async def close(self) -> None:
        """Cancel what is in flight and wait for it to end."""
        self._closed = True
        for task in self._running:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._running, return_exceptions=True)

    def _start_more(self) -> None:
        while not self._held() and self.capacity > 0:
            if not self._waiting and not self._draw():
                return
            start = _Start(self._version, next(self._turns))
            task = asyncio.create_task(self._run(self._waiting.popleft(), start))
            self._running[task] = start
            # A callback, as the task still counts as running until `_run` has returned.
            task.add_done_callback(self._ended)

    def _held(self) -> bool:
        return self._paused or self._closed or self._failed_in_row >= self._hopeless

    def _draw(self) -> bool:
        """Queue one more from the source; False when there is none."""
        if self._source is None:
            return False
        for data in self._source:
            self._waiting.append(data)
            return True
        self._source = None
        return False

    async def _run(self, data: DataT, start: _Start) -> None:
        try:
            group = await self._run_group(data)
        except Exception as error:  # noqa: BLE001 - any fault of one group is that group's alone
            # The first line alone: further ones tell of the single case and would split the count.
            cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if cause not in self.failures:
                _LOG.warning("a group failed: %s", cause)
            self.failures[cause] += 1
            self._failed_in_row += 1
        else:
            self._failed_in_row = 0
            if group is None:
                return
            self._accepted += 1
            bisect.insort(self._ready, (start, group), key=lambda each: each[0])

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._start_more()
        self._changed.set()

    async def _change(self) -> None:
        # Callers look at the state and come here without an await in between: on one event loop no
        # change can be missed.
        self._changed.clear()
        await self._changed.wait()

    def _rest_in_time(self) -> bool:
        """Whether what the next batch leaves behind can still be used before it is too old."""
        size = self._rule.batch_size
        left = [*self._running.values(), *(start for start, _ in self._ready[size:])]
        return self._rule.in_time(
            (start.version for start in left), batches=self._handed_out // size + 1
        )

    def _exhausted(self) -> bool:
        if self._running:
            return False
        nothing_left = not self._waiting and self._source is None
        return nothing_left or self._failed_in_row >= self._hopeless

    def _state(self) -> str:
        """The state in words, to show a person why nothing moves."""
        words = [
            f"{self.ready} ready, {self.running} in flight, {len(self._waiting)} waiting",
            f"version {self._version}, capacity {self.capacity}",
        ]
        if self._paused:
            words.append("paused")
        if self.failures:
            (cause, count), *_ = self.failures.most_common(1)
            words.append(f"{sum(self.failures.values())} failed, most often ({count}x) {cause}")
        if self.capacity <= 0 and not self._running and not self._paused:
            words.append(
                f"staleness allows {self._rule.allowed(self._version)} groups until the trainer "
                "raises the version"
            )
        return "; ".join(words)
