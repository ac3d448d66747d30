"""See what comes back of agents' requests in the process that makes them.

Wrapped are the public transports of httpx and httpx2, aiohttp's sessions, and `http.client` (which
requests, urllib3 and urllib wait in). Of the last two the status alone is seen, not the body.
"""

import asyncio
import functools
import http.client
import importlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from shakedown.agents.episode_tag import EPISODE_KEY
from shakedown.agents.reply_watch import ReplyWatch, fault_of, never_sent
from shakedown.agents.wire import WireCall

_PORTS = {"http": 80, "https": 443}
_MOST = 10_000  # calls of an episode; no agent means to make more
_MOST_PLACES = 8  # addresses that are told
Address = tuple[str, int | None]


@dataclass
class _Seen:
    strays: int  # before it began
    calls: list[WireCall] = field(default_factory=list)
    elsewhere: Counter[str] = field(default_factory=Counter)


class WireWatch:
    """What episodes of this process asked for and got, from `begin` to `take`.

    Args:
        base_url: of the server; empty: every POST counts, wherever it goes.
        recorded: it is the recording proxy's, which sees all that comes to it: told are the calls
            that had no answer.
    """

    def __init__(self, base_url: str, *, recorded: bool = False) -> None:
        self._place = address(base_url) if base_url else None
        self.recorded = recorded
        self._episodes: dict[str, _Seen] = {}
        self._strays = 0

    def install(self) -> None:
        """Watch for as long as this process lives."""
        for library in ("httpx", "httpx2"):
            try:
                module = importlib.import_module(library)
            except ImportError:
                continue
            _wrap_httpx(module, self)
        _wrap_http_client(self)
        try:
            _wrap_aiohttp(importlib.import_module("aiohttp"), self)
        except ImportError:
            return

    def begin(self, key: str) -> None:
        """An episode starts."""
        self._episodes[key] = _Seen(self._strays)

    def take(self, key: str) -> dict[str, Any] | None:
        """Its calls as JSON, the fields of `Sent`.

        None: a request could have been of any episode, such as one of a thread pool of the agent.
        """
        seen = self._episodes.pop(key, None)
        if seen is None or seen.strays != self._strays:
            return None
        # Plain fields, and written at once: `asdict` would copy them, at 0.1 ms a call.
        calls = [vars(c) for c in seen.calls if not (self.recorded and c.status)]
        return {"calls": calls, "elsewhere": dict(seen.elsewhere.most_common(_MOST_PLACES))}

    def call(self, method: str, url: str) -> WireCall:
        """A request that begins; noted where it asks a model."""
        found = WireCall()
        if method.upper() != "POST":
            return found
        seen = self._episodes.get(EPISODE_KEY.get())
        if seen is None:
            self._strays += 1
        elif self._place is not None and address(url) != self._place:
            seen.elsewhere[":".join(map(str, address(url)))] += 1
        elif len(seen.calls) < _MOST:
            seen.calls.append(found)
        return found


def address(url: str) -> Address:
    """Host and port; every name of this machine's own interface is one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = "127.0.0.1" if host in ("localhost", "::1", "0.0.0.0") else host  # noqa: S104
    return host, parts.port or _PORTS.get(parts.scheme)


def _end(call: WireCall, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        call.leave()
    else:
        call.unsent = never_sent(error)
        call.end(0, fault_of(error), f"{type(error).__name__} {error}")


def _watched(module: Any) -> type:
    """A stream of httpx that tells what goes through it."""

    class AsyncWatched(module.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, reply: ReplyWatch) -> None:
            self._inner, self._reply = inner, reply

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for data in self._inner:
                    self._reply.feed(data)
                    yield data
            except (asyncio.CancelledError, GeneratorExit):
                self._reply.left()
                raise
            except BaseException as error:
                self._reply.end(error)
                raise
            self._reply.end()

        async def aclose(self) -> None:
            self._reply.left()
            await self._inner.aclose()

    return AsyncWatched


def _watched_sync(module: Any) -> type:
    """As `_watched`, of synchronous clients."""

    class Watched(module.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, reply: ReplyWatch) -> None:
            self._inner, self._reply = inner, reply

        def __iter__(self) -> Iterator[bytes]:
            try:
                for data in self._inner:
                    self._reply.feed(data)
                    yield data
            except GeneratorExit:
                self._reply.left()
                raise
            except BaseException as error:
                self._reply.end(error)
                raise
            self._reply.end()

        def close(self) -> None:
            self._reply.left()
            self._inner.close()

    return Watched


def _wrap_httpx(module: Any, watch: WireWatch) -> None:
    watched, watched_sync = _watched(module), _watched_sync(module)
    asynchronous, sync = module.AsyncHTTPTransport, module.HTTPTransport
    original, original_sync = asynchronous.handle_async_request, sync.handle_request

    async def handle_async_request(transport: Any, request: Any) -> Any:
        call = watch.call(request.method, str(request.url))
        try:
            response = await original(transport, request)
        except BaseException as error:
            _end(call, error)
            raise
        _watch_reply(watch, call, response, watched)
        return response

    def handle_request(transport: Any, request: Any) -> Any:
        call = watch.call(request.method, str(request.url))
        try:
            response = original_sync(transport, request)
        except BaseException as error:
            _end(call, error)
            raise
        _watch_reply(watch, call, response, watched_sync)
        return response

    asynchronous.handle_async_request, sync.handle_request = handle_async_request, handle_request


def _watch_reply(watch: WireWatch, call: WireCall, response: Any, watched: type) -> None:
    if watch.recorded:
        call.end(response.status_code)  # the proxy knows the rest
        return
    reply = ReplyWatch(
        call,
        response.status_code,
        response.headers.get("content-type", ""),
        encoded=bool(response.headers.get("content-encoding")),
    )
    response.stream = watched(response.stream, reply)


def _end_by_head(call: WireCall, status: int, kind: str) -> None:
    """Without the body: HTML is told by its type."""
    if status >= 400:
        ReplyWatch(call, status, kind).end()
        return
    call.heard = time.time()
    fault = "bad_reply" if "html" in kind.lower() else ""
    call.end(status, fault, f"status {status} with {kind}" if fault else "")


def _wrap_http_client(watch: WireWatch) -> None:
    connection: Any = http.client.HTTPConnection
    original: Callable[..., Any] = connection.getresponse

    @functools.wraps(original)
    def getresponse(self: Any) -> Any:
        # What it was asked stands in no public attribute; without it every answer counts.
        method = getattr(self, "_method", None) or "POST"
        call = watch.call(method, f"//{self.host}:{self.port}")
        try:
            response = original(self)
        except BaseException as error:
            _end(call, error)
            raise
        _end_by_head(call, response.status, response.getheader("content-type") or "")
        return response

    connection.getresponse = getresponse


def _wrap_aiohttp(module: Any, watch: WireWatch) -> None:
    async def started(_session: Any, context: SimpleNamespace, told: Any) -> None:
        context.call = watch.call(told.method, str(told.url))

    async def ended(_session: Any, context: SimpleNamespace, told: Any) -> None:
        _end_by_head(context.call, told.response.status, told.response.content_type)

    async def failed(_session: Any, context: SimpleNamespace, told: Any) -> None:
        _end(context.call, told.exception)

    original = module.ClientSession.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, trace_configs: Any = None, **kwargs: Any) -> None:
        trace = module.TraceConfig()
        trace.on_request_start.append(started)
        trace.on_request_end.append(ended)
        trace.on_request_exception.append(failed)
        original(self, *args, trace_configs=[*(trace_configs or ()), trace], **kwargs)

    module.ClientSession.__init__ = init
