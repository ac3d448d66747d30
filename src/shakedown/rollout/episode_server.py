"""The server that agents talk to: it knows the episodes, and sees their requests and replies.

Each episode has a key. A call belongs to the episode whose key stands in its URL
(`/e/KEY/v1/chat/completions`), else in the header that the agent's worker sets, else in its
bearer token or `x-api-key`. Agents never see the engine's key.
"""

import contextlib
import secrets
import socket
import time
from abc import ABC, abstractmethod
from typing import Any, Self

from aiohttp import web

from shakedown.agents.call_log import CallLog, SeenBy
from shakedown.agents.endpoint import HEADER
from shakedown.agents.wire import WireCall, out_of_descriptors
from shakedown.core.http import LOOPBACK, application, listening
from shakedown.inference.upstream import Upstream
from shakedown.rollout.agent_calls import Call
from shakedown.rollout.request_gate import RequestGate
from shakedown.rollout.shared_history import SharedHistory

_AGAIN_SECONDS = 0.5  # less than asyncio waits before it tries again


class EpisodeServer(ABC):
    """Use it as `async with ...`; it listens on a free port of 127.0.0.1.

    Args:
        path: of the episodes' base URLs, such as `/v1`.
        engine: connection to the engine; entered with the server.
        log_calls: also keep requests and replies of episodes for people: see `log_of`.

    `history` looks for replies of other rows in the messages of episodes that were begun there.
    `recorded` counts calls; with the server's own `api_key`, outside of an episode, an agent can
    ask for the models.
    """

    seen_by: SeenBy

    def __init__(self, path: str, engine: Upstream, *, log_calls: bool) -> None:
        self.api_key = secrets.token_hex(16)
        self._path, self._engine = path, engine
        self._episodes: dict[str, list[Call]] = {}
        self._log_calls, self._logs = log_calls, dict[str, CallLog]()
        self._wires = dict[str, list[WireCall]]()
        self.history = SharedHistory()
        self._stack = contextlib.AsyncExitStack()
        self.gate = RequestGate()
        self.recorded = 0
        self.host, self.port = LOOPBACK, 0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._engine)
            self._listening = stack.enter_context(_ListeningSocket(self.host))
            app = application(self._handle, "/e/{key}/{path:.*}", "/{path:.*}")
            self.port = await stack.enter_async_context(listening(app, self._listening))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all connections, and listen no more."""
        await self._stack.aclose()

    @property
    def base_url(self) -> str:
        """The base URL for agents that use the server's own key."""
        return f"http://{self.host}:{self.port}{self._path}"

    @property
    def full_at(self) -> float:
        """Unix time at which there was last no descriptor for an agent's connection; 0: never."""
        return self._listening.full_at

    def open(self) -> tuple[str, str]:
        """Begin an episode; returns its key and its own base URL."""
        key = secrets.token_hex(16)
        self._episodes[key], self._wires[key] = [], []
        if self._log_calls:
            self._logs[key] = CallLog(self.seen_by)
        return key, f"http://{self.host}:{self.port}/e/{key}{self._path}"

    def close(self, key: str) -> list[Call]:
        """End an episode: its calls in the order in which they ended."""
        self._logs.pop(key, None)
        self._wires.pop(key, None)
        return self._episodes.pop(key, [])

    def log_of(self, key: str) -> CallLog | None:
        """The readable log of an episode that is not closed; None: none is kept."""
        return self._logs.get(key)

    def wire_of(self, key: str) -> list[WireCall]:
        """The requests of an episode that is not closed, with their outcomes."""
        return self._wires.get(key, [])

    @abstractmethod
    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Answer an agent."""


def episode_key(request: web.Request) -> str:
    """The key of a call; empty: it gives none."""
    sent = request.headers
    token = sent.get("Authorization", "").removeprefix("Bearer ").strip()
    given = (request.match_info.get("key"), sent.get(HEADER), sent.get("x-api-key"), token)
    return next(filter(None, given), "")


class _ListeningSocket(socket.socket):
    """Bound to a free port; notes when there was no descriptor left for a connection.

    asyncio leaves such a connection in the queue, where its client waits, says so and tries again a
    second later.

    Args:
        host: its own address.

    `full_at`: Unix time of the last such connection; 0: there was none.
    """

    def __init__(self, host: str) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.full_at = 0.0
        self.bind((host, 0))

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; note a lack of descriptors."""
        try:
            return super().accept()
        except OSError as error:
            if not out_of_descriptors(error):
                raise
            before, self.full_at = self.full_at, time.time()
            if self.full_at - before < _AGAIN_SECONDS:
                # asyncio does not stop at the first one, and would say it thousands of times.
                raise BlockingIOError from error
            raise
