"""Calls of an inference server: connections, retries, neutral sampling, its models.

By aiohttp a request takes 0.33 ms of CPU; by httpx 0.28, which searches all connections of a pool
for each and had to be spread over 64 of them, 0.94 (measured with 128 at once).
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from shakedown.core import http
from shakedown.core.errors import ServerError, UsageError
from shakedown.core.http import Answer, NoAnswerError
from shakedown.inference.auth import bearer

# Seconds. Below the server's own limit: uvicorn, and so vLLM and SGLang, closes an idle connection
# after 5 s, and a request that is sent just then is lost.
IDLE_SECONDS = 3.0
# Thousands of requests at once wait in the server's accept queue: with a client's usual 5 s, and
# 1000 connections, 999 of 2048 timed out; with these all were answered.
CONNECT_SECONDS = 60.0
# Sampling that narrows nothing, part of every request: a server fills omitted values from the
# checkpoint's generation_config.json, and would draw tokens from another distribution than the
# trained one.
NEUTRAL: Mapping[str, float] = MappingProxyType(
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
)
# Seconds before each further try. At once first: mostly the server closed a kept connection.
PAUSES = (0.0, 0.2, 1.0, 3.0)
AT_ONCE = PAUSES[:1]
MODELS = "/v1/models"  # below a URL without its version
# Asked again after these: the server did not get the request, or its answer was lost, which does
# no harm: sampling changes nothing on the server, nor does loading the same weights twice.
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
_MODELS_SECONDS = 30.0
_SHOWN = 10  # names in a message
_REFUSED = (401, 403)
_tls_context = functools.cache(http.tls_context)  # once a process: building one costs 20 ms

Value = TypeVar("Value")


class Upstream:
    """Use it as `async with Upstream(api_key) as upstream`.

    Args:
        api_key: what the servers ask for; empty: nothing.
        options: of `aiohttp.ClientSession`.
    """

    def __init__(self, api_key: str = "", **options: Any) -> None:
        self._options = {"headers": bearer(api_key), **options}
        self._stack = contextlib.AsyncExitStack()
        self._kept: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._kept = await stack.enter_async_context(self._session(keep=True))
            self._new = await stack.enter_async_context(self._session(keep=False))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._kept = None
        await self._stack.aclose()

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        seconds: float,
        pauses: Sequence[float] = PAUSES,
        largest: int = http.LARGEST_ANSWER,
        **more: Any,
    ) -> Answer:
        """The whole answer; one that broke off is asked for again, too.

        Args:
            seconds: for all tries.
            largest: bytes of its body.
            pauses, more: as of `ask`.

        Raises:
            NoAnswerError: none came.
        """

        async def once(session: aiohttp.ClientSession, left: float | None) -> Answer:
            async with await _sent(session, method, url, left, **more) as reply:
                return await http.read_whole(reply, largest)

        sessions = self._sessions()
        try:
            return await _tried(once, sessions, seconds, pauses)
        except http.FAULTS as error:
            raise NoAnswerError.of(url, error, seconds) from error

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        url: str | URL,
        *,
        seconds: float | None = None,
        pauses: Sequence[float] = PAUSES,
        lost: Callable[[BaseException], None] = lambda _: None,
        **more: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to read on; asked again while nothing of it has come.

        Args:
            seconds: for all tries, and to read the reply; None: no limit.
            pauses: seconds before each further try.
            lost: is told of each try that another one follows.
            more: of `aiohttp.ClientSession.request`.

        Raises:
            aiohttp.ClientError, TimeoutError: of the last try.
        """

        def once(
            session: aiohttp.ClientSession, left: float | None
        ) -> Awaitable[aiohttp.ClientResponse]:
            return _sent(session, method, url, left, **more)

        async with await _tried(once, self._sessions(), seconds, pauses, lost) as reply:
            yield reply

    def _sessions(self) -> Iterator[aiohttp.ClientSession]:
        """A session per try: other kept connections may be as stale, so retries use a new one.

        Raises:
            ValueError: outside of the block.
        """
        if self._kept is None:
            raise ValueError("Upstream used outside its `async with` block")
        return itertools.chain([self._kept], itertools.repeat(self._new))

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        # No limit: the server queues by itself, and callers are bounded elsewhere.
        connector = (
            aiohttp.TCPConnector(limit=0, ssl=_tls_context(), keepalive_timeout=IDLE_SECONDS)
            if keep
            else aiohttp.TCPConnector(limit=0, ssl=_tls_context(), force_close=True)
        )
        # No proxy of the environment: it has no business between a trainer and its server.
        return aiohttp.ClientSession(connector=connector, trust_env=False, **self._options)


async def ask_once(
    method: str, url: str, api_key: str = "", *, seconds: float, **more: Any
) -> Answer:
    """`Upstream.fetch` over connections of its own.

    Raises:
        NoAnswerError: none came.
    """
    async with Upstream(api_key) as upstream:
        return await upstream.fetch(method, url, seconds=seconds, pauses=AT_ONCE, **more)


async def _tried(
    once: Callable[[aiohttp.ClientSession, float | None], Awaitable[Value]],
    sessions: Iterator[aiohttp.ClientSession],
    seconds: float | None,
    pauses: Sequence[float],
    lost: Callable[[BaseException], None] = lambda _: None,
) -> Value:
    """The result of `once`, called again after each pause for as long as its request is lost."""
    loop = asyncio.get_running_loop()
    end = None if seconds is None else loop.time() + seconds
    for pause in pauses:
        try:
            return await once(next(sessions), None if end is None else end - loop.time())
        except _LOST as error:
            if _is_own(error) or (end is not None and loop.time() + pause >= end):
                raise
            lost(error)
        await asyncio.sleep(pause)
    return await once(next(sessions), None if end is None else end - loop.time())


def _is_own(error: BaseException) -> bool:
    """Whether this process has no descriptor left: the server was not even tried."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


async def _sent(
    session: aiohttp.ClientSession,
    method: str,
    url: str | URL,
    seconds: float | None,
    **more: Any,
) -> aiohttp.ClientResponse:
    connect = CONNECT_SECONDS if seconds is None else min(seconds, CONNECT_SECONDS)
    times = aiohttp.ClientTimeout(seconds, sock_connect=connect)
    # The secret goes to no other place.
    return await session.request(method, url, timeout=times, allow_redirects=False, **more)


class NoListError(ServerError):
    """The server answered without a list of models; `status`: of HTTP."""

    def __init__(self, message: str, status: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status

    @property
    def key_refused(self) -> bool:
        return self.status in _REFUSED

    @property
    def final(self) -> bool:
        """Whether nothing else that is asked will be answered either."""
        return self.key_refused or self.status >= 500


@dataclass(frozen=True)
class Served:
    """A server and its models: its URL, and each model's row by name."""

    url: str
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def sglang(self) -> bool:
        """Whether it says that it is SGLang."""
        return any(str(row.get("owned_by", "")).lower() == "sglang" for row in self.models.values())

    def pick(self, wanted: str = "") -> str:
        """The model to ask for: the one wanted, else the first.

        Raises:
            UsageError: it is not served.
            ServerError: none is.
        """
        if not self.models:
            raise ServerError(f"{self.url} serves no model")
        if wanted and wanted not in self.models:
            names = ", ".join(list(self.models)[:_SHOWN])
            raise UsageError(f"{self.url} does not serve {wanted!r}; it serves {names}")
        return wanted or next(iter(self.models))


async def ask_models(url: str, api_key: str = "", *, seconds: float = _MODELS_SECONDS) -> Served:
    """Ask a server for its models.

    Args:
        url: with its version, `http://HOST:PORT/v1`.

    Raises:
        NoAnswerError: nothing answers there.
        NoListError: it refuses the key, fails, or is not an inference server.
    """
    try:
        answer = await ask_once("GET", f"{url}/models", api_key, seconds=seconds)
    except NoAnswerError as error:
        raise NoAnswerError(
            f"no server answers at {url}: {error.why}",
            error.why,
            hint="start one: shakedown serve --help; or give the URL of one that runs",
        ) from error.__cause__
    return Served(url, _models(url, answer.status, answer.text))


def _models(url: str, status: int, text: str) -> dict[str, Mapping[str, Any]]:
    if status in _REFUSED:
        raise NoListError(
            f"{url} refuses the key: HTTP {status}",
            status,
            'export OPENAI_API_KEY="$(cat FOLDER/secret)", FOLDER being the server\'s',
        )
    try:
        rows = json.loads(text)["data"]
        return {str(row["id"]): row for row in rows if row.get("id")}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        said = " ".join(text[:200].split())
        raise NoListError(
            f"{url}/models: HTTP {status}, no list of models: {said or 'an empty body'}",
            status,
            "read the server's log" if status >= 500 else "is this the inference server's URL?",
        ) from error
