"""Watch an unchanged agent's HTTP requests in its own process, where no server sees them.

Names the episode on each request to the server, measures waits for the client's pool, connects and
blocks of the event loop, and notes requests that never came to the server or went elsewhere.
Wrapped are the public transports of httpx and its successor httpx2 (through which most clients
send: openai, anthropic, litellm), aiohttp's sessions, and `http.client` (which requests, urllib3
and urllib wait in).
"""

import asyncio
import contextlib
import functools
import http.client
import importlib
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from shakedown.agents.endpoint import EPISODE_KEY, HEADER
from shakedown.agents.event_loop_lag import place_of
from shakedown.agents.measured import HttpCall
from shakedown.agents.wire import WireCall, fault_of, never_sent

_PORTS = {"http": 80, "https": 443}
_MOST = 10_000  # calls of an episode; no agent means to make more
_MOST_PLACES = 8  # addresses that are told
_Address = tuple[str, int | None]


@dataclass
class _Seen:
    strays: int  # before it began
    calls: list[WireCall] = field(default_factory=list)
    elsewhere: Counter[str] = field(default_factory=Counter)


class HttpWatch:
    """Requests of this process; those of an episode from its `begin` to its `take`.

    Args:
        base_url: of the server; empty: every POST counts, wherever it goes.
        seen_there: the server there sees all that comes to it: told are the calls that had no
            answer.

    `calls`: one per request. `tls_contexts`, `tls_seconds_each`: as in `Measured`.
    """

    def __init__(self, base_url: str, *, seen_there: bool) -> None:
        self._place = _address(base_url) if base_url else None
        self._seen_there = seen_there
        self._episodes: dict[str, _Seen] = {}
        self._strays = 0
        self.calls: list[HttpCall] = []
        self.tls_contexts, self.tls_seconds_each = 0, 0.0

    def install(self, *, share_tls: bool) -> None:
        """Watch for as long as this process lives.

        Args:
            share_tls: let clients that ask for the default TLS context share one. An agent that
                opens one client per episode spends 20 ms or more of the event loop on each.
        """
        waits: Any = http.client.HTTPConnection
        waits.getresponse = self._watching_http_client(waits.getresponse)
        if (aiohttp := _import("aiohttp")) is not None:
            aiohttp.ClientSession.__init__ = self._watching_aiohttp(aiohttp)
        for library in ("httpx", "httpx2"):
            module = _import(library)
            if module is None:
                continue
            transport, sync = module.AsyncHTTPTransport, module.HTTPTransport
            transport.handle_async_request = self._watching(transport.handle_async_request)
            sync.handle_request = self._watching_sync(sync.handle_request)
            # Private, as there is no public place where every client's context is made; where
            # a version has moved it, contexts are merely not shared.
            inner = _import(f"{library}._transports.default")
            if share_tls and hasattr(inner, "create_ssl_context"):
                inner.create_ssl_context = self._sharing(inner.create_ssl_context)

    def begin(self, key: str) -> None:
        """An episode starts."""
        self._episodes[key] = _Seen(self._strays)

    def take(self, key: str) -> dict[str, Any] | None:
        """The episode's calls as JSON, the fields of `Sent`.

        None: a request could have been of any episode, such as one of a thread pool of the agent.
        """
        seen = self._episodes.pop(key, None)
        if seen is None or seen.strays != self._strays:
            return None
        # Plain fields, and written at once: `asdict` would copy them, at 0.1 ms a call.
        calls = [vars(call) for call in seen.calls if not (self._seen_there and call.status)]
        return {"calls": calls, "elsewhere": dict(seen.elsewhere.most_common(_MOST_PLACES))}

    def _call(self, method: str, url: str) -> WireCall:
        """A request that begins; noted where it asks a model."""
        found = WireCall()
        if method.upper() != "POST":
            return found
        seen = self._episodes.get(EPISODE_KEY.get())
        if seen is None:
            self._strays += 1
        elif self._place is not None and _address(url) != self._place:
            seen.elsewhere[":".join(map(str, _address(url)))] += 1
        elif len(seen.calls) < _MOST:
            seen.calls.append(found)
        return found

    @contextlib.contextmanager
    def _asked(self, method: str, url: str) -> Iterator[WireCall]:
        """A request, up to its answer's head."""
        call = self._call(method, url)
        try:
            yield call
        except BaseException as error:
            _failed(call, error)
            raise

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[HttpCall]:
        """A request of a synchronous client; noted where it holds the event loop."""
        seen = HttpCall()
        if not _on_event_loop():  # as in `asyncio.to_thread`, where it does no harm
            yield seen
            return
        seen.place, began = place_of(sys._getframe()), time.perf_counter()
        self.calls.append(seen)
        try:
            yield seen
        finally:
            seen.blocking = time.perf_counter() - began

    def _tag(self, request: Any) -> None:
        """Add the episode's header, which no other server sees."""
        key = EPISODE_KEY.get()
        if key and self._place is not None and _address(str(request.url)) == self._place:
            request.headers[HEADER] = key

    def _watching(self, original: Callable[[Any, Any], Awaitable[Any]]) -> Callable[..., Any]:
        async def handle_async_request(transport: Any, request: Any) -> Any:
            self._tag(request)
            seen = HttpCall()
            self.calls.append(seen)
            trace = _tracer(seen, time.perf_counter(), request.extensions.get("trace"))
            request.extensions = {**request.extensions, "trace": trace}
            with self._asked(request.method, str(request.url)) as call:
                response = await original(transport, request)
            seen.status = response.status_code
            _answered(call, response.status_code, response.headers.get("content-type"))
            return response

        return handle_async_request

    def _watching_sync(self, original: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def handle_request(transport: Any, request: Any) -> Any:
            self._tag(request)
            with (
                self._asked(request.method, str(request.url)) as call,
                self._blocking() as seen,
            ):
                response = original(transport, request)
            seen.status = response.status_code
            _answered(call, response.status_code, response.headers.get("content-type"))
            return response

        return handle_request

    def _watching_http_client(self, original: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def getresponse(connection: Any) -> Any:
            # The request is in no public attribute; without it every answer counts.
            method = getattr(connection, "_method", None) or "POST"
            url = f"//{connection.host}:{connection.port}"
            with self._asked(method, url) as call, self._blocking() as seen:
                response = original(connection)
            seen.status = response.status
            _answered(call, response.status, response.getheader("content-type"))
            return response

        return getresponse

    def _watching_aiohttp(self, module: Any) -> Callable[..., None]:
        async def started(_session: Any, context: SimpleNamespace, told: Any) -> None:
            context.call = self._call(told.method, str(told.url))

        async def ended(_session: Any, context: SimpleNamespace, told: Any) -> None:
            _answered(context.call, told.response.status, told.response.content_type)

        async def failed(_session: Any, context: SimpleNamespace, told: Any) -> None:
            _failed(context.call, told.exception)

        original = module.ClientSession.__init__

        @functools.wraps(original)
        def init(session: Any, *args: Any, trace_configs: Any = None, **kwargs: Any) -> None:
            trace = module.TraceConfig()
            trace.on_request_start.append(started)
            trace.on_request_end.append(ended)
            trace.on_request_exception.append(failed)
            original(session, *args, trace_configs=[*(trace_configs or ()), trace], **kwargs)

        return init

    def _sharing(self, original: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
        cached: dict[bool, ssl.SSLContext] = {}

        def create_ssl_context(
            verify: Any = True, cert: Any = None, trust_env: bool = True
        ) -> ssl.SSLContext:
            if verify is not True or cert is not None:
                return original(verify=verify, cert=cert, trust_env=trust_env)
            self.tls_contexts += 1
            if trust_env not in cached:
                begin = time.perf_counter()
                cached[trust_env] = original(verify=verify, cert=cert, trust_env=trust_env)
                self.tls_seconds_each = time.perf_counter() - begin
            return cached[trust_env]

        return create_ssl_context


def _failed(call: WireCall, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        call.leave()
    else:
        call.unsent = never_sent(error)
        call.end(0, fault_of(error), f"{type(error).__name__} {error}")


def _answered(call: WireCall, status: int, kind: str | None) -> None:
    """End the call by the answer's head: HTML is recognised by its type."""
    call.heard = time.time()
    html = status < 400 and "html" in (kind or "").lower()
    fault = "api_status" if status >= 400 else "bad_reply" if html else ""
    call.end(status, fault, f"status {status}{f' with {kind}' if html else ''}" if fault else "")


def _address(url: str) -> _Address:
    """Host and port; every name of this machine's own interface is one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = "127.0.0.1" if host in ("localhost", "::1", "0.0.0.0") else host  # noqa: S104
    return host, parts.port or _PORTS.get(parts.scheme)


def _tracer(
    seen: HttpCall, begin: float, inner: Callable[..., Awaitable[None]] | None
) -> Callable[[str, dict[str, Any]], Awaitable[None]]:
    """httpcore's `trace` extension: its first event ends the wait for a free connection."""
    marks: dict[str, float] = {}

    async def trace(event: str, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if not marks:
            seen.pool_wait = now - begin
        marks[event] = now
        if event == "connection.connect_tcp.complete":
            seen.connect = now - marks["connection.connect_tcp.started"]
        if inner is not None:
            await inner(event, info)

    return trace


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
