"""Connections to inference servers, and what is asked again.

By aiohttp a request takes 0.33 ms of CPU; by httpx 0.28, which searches all connections of a pool
for each and had to be spread over 64 of them, 0.94 (measured with 128 at once).
"""

import asyncio
import contextlib
import errno
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import aiohttp
import httpx

from shakedown.inference.secret import bearer
from shakedown.inference.upstream import CONNECT_SECONDS, IDLE_SECONDS

# Asked again after these: the server did not get the request, or its answer was lost, which does
# no harm: sampling changes nothing on the server, nor does loading the same weights twice.
LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
# Of a server that cannot be asked; ValueError: by this URL or key.
FAULTS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
_LARGEST = 1 << 24  # bytes of a text that is read whole: vLLM's metrics are below one MiB
# Seconds before each further try. At once first: mostly the server closed a kept connection.
PAUSES = (0.0, 0.2, 1.0, 3.0)
AT_ONCE = PAUSES[:1]
tls_context = functools.cache(httpx.create_ssl_context)  # once a process: building one costs 20 ms


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

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        url: str,
        *,
        seconds: float | None = None,
        pauses: Sequence[float] = PAUSES,
        whole: bool = False,
        lost: Callable[[BaseException], None] = lambda _: None,
        **more: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply; asked again while nothing of it has come.

        Args:
            seconds: for all tries, and to read the reply; None: no limit.
            pauses: seconds before each further try.
            whole: read it inside the tries, so that one that broke off is asked for again.
            lost: is told of each try that another one follows.
            more: of `aiohttp.ClientSession.request`.

        Raises:
            aiohttp.ClientError, TimeoutError: of the last try.
        """
        if self._kept is None:
            raise ValueError("Upstream used outside its `async with` block")
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        # Other kept connections may be as stale: what was lost goes over a new one.
        sessions = itertools.chain([self._kept], itertools.repeat(self._new))
        for pause, session in zip([*pauses, None], sessions, strict=False):
            left = None if end is None else end - loop.time()
            try:
                reply = await _once(session, method, url, left, whole=whole, **more)
                break
            except LOST as error:
                late = end is not None and pause is not None and loop.time() + pause >= end
                if pause is None or late or _is_own(error):
                    raise
                lost(error)
            await asyncio.sleep(pause)
        async with reply:
            yield reply

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        # No limit: the server queues by itself, and callers are bounded elsewhere.
        connector = (
            aiohttp.TCPConnector(limit=0, ssl=tls_context(), keepalive_timeout=IDLE_SECONDS)
            if keep
            else aiohttp.TCPConnector(limit=0, ssl=tls_context(), force_close=True)
        )
        # No proxy of the environment: it has no business between a trainer and its server.
        return aiohttp.ClientSession(connector=connector, trust_env=False, **self._options)


async def ask_once(
    method: str, url: str, api_key: str = "", *, seconds: float, **more: Any
) -> tuple[int, str]:
    """Status and text of a whole answer, over connections of its own.

    Raises:
        aiohttp.ClientError, TimeoutError, OSError, ValueError: as `FAULTS`; an endless answer, too.
    """
    body = bytearray()
    async with (
        Upstream(api_key) as upstream,
        upstream.ask(method, url, seconds=seconds, pauses=AT_ONCE, **more) as reply,
    ):
        async for piece in reply.content.iter_any():
            body += piece
            if len(body) > _LARGEST:
                raise ValueError(f"{url} answers with more than {_LARGEST} bytes")
        return reply.status, body.decode("utf-8", "replace")


def _is_own(error: BaseException) -> bool:
    """Whether this process has no descriptor left: the server was not even tried."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


async def _once(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    seconds: float | None,
    *,
    whole: bool,
    **more: Any,
) -> aiohttp.ClientResponse:
    connect = CONNECT_SECONDS if seconds is None else min(seconds, CONNECT_SECONDS)
    times = aiohttp.ClientTimeout(seconds, sock_connect=connect)
    # The secret goes to no other place.
    reply = await session.request(method, url, timeout=times, allow_redirects=False, **more)
    if whole:
        await reply.read()
    return reply
