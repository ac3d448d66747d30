"""HTTP for whoever calls or serves here, by aiohttp: one whole answer, and a server of our own.

How inference servers are called (kept connections, requests that are sent again) stands in
`inference.upstream`, which reads answers and names faults as here.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import certifi
from aiohttp import web

from shakedown.core.errors import ServerError

LOOPBACK = "127.0.0.1"
# Of a request to a server of our own, and of one line of a stream: a conversation with images.
LARGEST_REQUEST = 1 << 26  # bytes
LARGEST_ANSWER = 1 << 24  # bytes: vLLM's metrics are below one MiB
# Of a server that gives no answer; ValueError: by this URL or key, or an endless one.
FAULTS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
_BACKLOG = 4096  # a thousand episodes connect at once

Value = TypeVar("Value")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Answer:
    """A whole answer; `kind`: its content type."""

    status: int
    content: bytes
    kind: str

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


class NoAnswerError(ServerError):
    """No whole answer came; `why`, and the library's exception as its cause."""

    def __init__(self, message: str, why: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.why = why

    @classmethod
    def of(cls, url: str, error: BaseException, seconds: float | None) -> "NoAnswerError":
        """By one of FAULTS; `seconds`: that the server had."""
        told = why(error, seconds)
        return cls(f"{url}: {told}", told)

    @property
    def timed_out(self) -> bool:
        return isinstance(self.__cause__, TimeoutError)

    @property
    def unconnected(self) -> bool:
        """Whether nobody took the connection."""
        return isinstance(self.__cause__, aiohttp.ClientConnectorError)


def fetch(method: str, url: str, *, seconds: float, **more: Any) -> Answer:
    """As `ask`, for synchronous code."""
    return asyncio.run(ask(method, url, seconds=seconds, **more))


async def ask(
    method: str,
    url: str,
    *,
    seconds: float,
    largest: int = LARGEST_ANSWER,
    by_proxy: bool = False,
    **more: Any,
) -> Answer:
    """The answer over a connection of its own; a redirect is one, and is not followed.

    Args:
        seconds: for all of it.
        largest: bytes of its body; 0: none of it is read.
        by_proxy: by the environment's proxy, if it names one for this URL. Without it variables
            such as HTTP_PROXY change nothing; a .netrc is never read.
        more: of `aiohttp.ClientSession.request`.

    Raises:
        NoAnswerError: none came.
    """
    proxy = _proxy_of(url) if by_proxy else None
    times = aiohttp.ClientTimeout(seconds)
    tls = tls_context() if url.startswith("https:") else True
    connector = aiohttp.TCPConnector(ssl=tls, force_close=True)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, trust_env=False) as session,
            session.request(
                method, url, timeout=times, allow_redirects=False, proxy=proxy, **more
            ) as reply,
        ):
            return await read_whole(reply, largest)
    except FAULTS as error:
        raise NoAnswerError.of(url, error, seconds) from error


async def read_whole(reply: aiohttp.ClientResponse, largest: int) -> Answer:
    """Read a reply to its end, or, with 0, no further than its headers.

    Raises:
        ValueError: it has more than `largest` bytes: an endless one is none.
        aiohttp.ClientError, TimeoutError: it broke off.
    """
    content = bytearray()
    if not largest:
        return Answer(reply.status, b"", reply.content_type)
    async for piece in reply.content.iter_any():
        content += piece
        if len(content) > largest:
            raise ValueError(f"it answers with more than {largest} bytes")
    return Answer(reply.status, bytes(content), reply.content_type)


def tls_context() -> ssl.SSLContext:
    """Trusts this machine's CAs and certifi's; or those that SSL_CERT_FILE or SSL_CERT_DIR name."""
    context = ssl.create_default_context()
    if not (os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
        # Slim images, and Python builds that look in another folder, have none of the machine's.
        context.load_verify_locations(certifi.where())
    return context


def application(handler: Handler, *paths: str) -> web.Application:
    """One that answers every method at `paths`, or at any path."""
    app = web.Application(client_max_size=LARGEST_REQUEST)
    for path in paths or ("/{path:.*}",):
        app.router.add_route("*", path, handler)
    return app


@contextlib.asynccontextmanager
async def listening(app: web.Application, bound: socket.socket) -> AsyncIterator[int]:
    """Answer at a bound socket while the block runs, which is given its port."""
    # A client that is gone ends its call in the server behind us, too.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=_BACKLOG).start()
        yield bound.getsockname()[1]
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def in_thread(block: AbstractAsyncContextManager[Value]) -> Iterator[Value]:
    """An asynchronous block for synchronous code: on an event loop in a thread of its own."""
    entered: Future[tuple[Value, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_hold(block, entered)), daemon=True)
    thread.start()
    value, loop, over = entered.result()
    try:
        yield value
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(over.set)
        thread.join()


async def _hold(
    block: AbstractAsyncContextManager[Value],
    entered: "Future[tuple[Value, asyncio.AbstractEventLoop, asyncio.Event]]",
) -> None:
    over = asyncio.Event()
    try:
        async with block as value:
            entered.set_result((value, asyncio.get_running_loop(), over))
            await over.wait()
    except BaseException as error:
        if entered.done():
            raise
        entered.set_exception(error)


def _proxy_of(url: str) -> str | None:
    """As curl and urllib choose one: HTTP_PROXY, HTTPS_PROXY, NO_PROXY."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def why(error: BaseException, seconds: float | None = None) -> str:
    """A fault for people; `seconds`: that the server had."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        refused = getattr(error.certificate_error, "verify_message", str(error)).rstrip(".")
        told = f"the server's certificate is refused: {refused}"
        return f"{told} (a CA of your own: set SSL_CERT_FILE to its certificate)"
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
        return f"no answer within {seconds:g} s" if seconds is not None else "no answer in time"
    return f"{type(error).__name__} {error}".strip()
