"""Hold requests to the server back while its weights change, and wait for those in flight."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from shakedown.core.errors import CannotJudgeError

# A request that arrives while the server interrupts the others is not interrupted with them.
_INTERRUPT_AGAIN_SECONDS = 1.0


class RequestGate:
    """Lets requests through, or holds new ones back until those in flight have ended.

    `in_flight` counts the requests inside. Use it on one event loop.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._open, self._ended = asyncio.Event(), asyncio.Event()
        self._open.set()

    async def wait_open(self) -> None:
        """Return at once while it is open."""
        # A loop: it may be closed again before a waiting task gets its turn.
        while not self._open.is_set():
            await self._open.wait()

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until it is open; inside the block the request counts as in flight."""
        await self.wait_open()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._ended.set()

    async def close(
        self, within: float, interrupt: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """Let nothing in, and wait until nothing is in flight.

        Args:
            within: seconds to wait.
            interrupt: asks the server to end what is in flight; False when nothing may be
                interrupted yet. Called at once, whenever a request has ended, and every second;
                not again within a second after it has asked.

        Raises:
            CannotJudgeError: some were still in flight after `within` seconds.
        """
        self._open.clear()
        next_interrupt = 0.0
        try:
            async with asyncio.timeout(within):
                while self.in_flight:
                    # Cleared before `interrupt`: requests that end meanwhile must be noticed.
                    self._ended.clear()
                    if interrupt and time.monotonic() >= next_interrupt and await interrupt():
                        next_interrupt = time.monotonic() + _INTERRUPT_AGAIN_SECONDS
                    if self.in_flight:
                        await self._end_of_one()
        except TimeoutError:
            raise CannotJudgeError(
                f"{self.in_flight} generations were still in flight after {within:.0f} s"
            ) from None

    def open(self) -> None:
        """Let requests in again."""
        self._open.set()

    async def _end_of_one(self) -> None:
        """Wait until a request ends, or it is time to interrupt again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _INTERRUPT_AGAIN_SECONDS)
