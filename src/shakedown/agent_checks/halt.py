"""End a run of episodes early without losing any: by a signal, or as its server is gone."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator

from shakedown.agent_checks.episodes import Stop
from shakedown.agent_checks.server_probe import ask_server
from shakedown.agents.agent_pool import AgentResult
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.wire import out_of_descriptors
from shakedown.core.errors import LaunchError

# Causes of an episode that may be the first to meet a server that is gone.
_SUSPECT = frozenset({"connection", "connect_timeout", "truncated"})
_ASK_AGAIN_SECONDS = 1.0


class Halt:
    """Lets episodes run until there is a reason not to.

    Args:
        endpoint: the server that is asked when an episode could not reach it; None: none is.
    """

    def __init__(self, endpoint: AgentEndpoint | None = None) -> None:
        self._endpoint = endpoint
        self._asking, self._asked = asyncio.Lock(), 0.0
        self._given_up = asyncio.Event()
        self.stop: Stop | None = None

    async def run(self, episode: Coroutine[None, None, AgentResult]) -> AgentResult:
        """The episode's result; it is not begun, or given up, where the run has to end."""
        if self.stop is not None:
            episode.close()
            return AgentResult(cause="not_asked", detail=self.stop.seen)
        running = asyncio.ensure_future(episode)
        waiting = asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
        except LaunchError as error:  # a worker had to be replaced and could not be
            self.stop = self.stop or Stop(str(error))
            cause = "file_descriptors" if out_of_descriptors(error) else "not_asked"
            return AgentResult(cause=cause, detail=str(error))
        finally:
            waiting.cancel()
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        seen = self.stop.seen if self.stop is not None else ""
        return AgentResult(cause="not_asked", detail=f"{seen}: not run to its end")

    async def look_at(self, result: AgentResult) -> None:
        """Ask the server itself after an episode that could not reach it."""
        url = self._endpoint.base_url if self._endpoint is not None else ""
        if not url or self._endpoint is None or result.cause not in _SUSPECT:
            return
        async with self._asking:
            if self.stop is not None or time.monotonic() - self._asked < _ASK_AGAIN_SECONDS:
                return
            server = await ask_server(url, self._endpoint.api_key)
            self._asked = time.monotonic()
            if server.gone:
                self.stop = Stop(server.error, gone_since=time.time())

    def by_signal(self, number: int) -> None:
        """Begin no further episode, and give those up that run."""
        self.stop = self.stop or Stop(f"stopped by {signal.Signals(number).name}", signal=number)
        self._given_up.set()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Inside, the first SIGINT or SIGTERM ends the run; a second one has its usual meaning."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals come to the main thread alone
            return
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

        def restore() -> None:
            for number in numbers:
                loop.remove_signal_handler(number)

        def stop(number: int) -> None:
            restore()
            self.by_signal(number)

        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            restore()
