"""Watch an unchanged agent's HTTP traffic: waits, connects, statuses, and the cost of TLS contexts.

Most clients (openai, anthropic, litellm ...) send through httpx or its successor httpx2. From
`HttpRecorder.install` on, the transport's public `handle_async_request` notes times on every
request. Agents that talk through something else are simply not seen.
"""

import asyncio
import contextlib
import functools
import http.client
import importlib
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shakedown.agents.call_log import CallLog, LoggedCall
from shakedown.agents.episode_tag import EPISODE_KEY
from shakedown.agents.event_loop_lag import place_of
from shakedown.agents.sent_messages import messages_of

_LIBRARIES = ("httpx", "httpx2")
_Handler = Callable[[Any, Any], Awaitable[Any]]


@dataclass
class HttpCall:
    """One HTTP request; times in seconds.

    `pool_wait` is the time until a connection of the client's pool was free, `connect` the time
    of the TCP handshake (0 on a kept connection), `status` is 0 when no answer came. `blocking`:
    seconds that a synchronous client held the event loop by it, 0 for others, and `place`: the
    agent's line, as `file:line in function`.
    """

    pool_wait: float = 0.0
    connect: float = 0.0
    status: int = 0
    blocking: float = 0.0
    place: str = ""


@dataclass
class HttpRecorder:
    """What was seen: one `HttpCall` a request, and what TLS contexts cost.

    `logs`: what episodes send, by their key, from when one is put there until `take_log`.
    """

    calls: list[HttpCall] = field(default_factory=list)
    tls_contexts: int = 0
    tls_seconds_each: float = 0.0
    logs: dict[str, CallLog] = field(default_factory=dict)

    def install(self, *, share_tls: bool, log_calls: bool = False) -> None:
        """Watch every httpx and httpx2 transport for as long as this process lives.

        Args:
            share_tls: let clients that ask for the default TLS context share one. An agent that
                opens a client an episode spends 20 ms or more of the event loop on each.
            log_calls: keep what is sent for people to read, in `logs`.
        """
        waits = http.client.HTTPConnection  # what requests, urllib3 and urllib wait in
        waits.getresponse = self._watching_sync(waits.getresponse)  # type: ignore[method-assign]
        for library in _LIBRARIES:
            module = _import(library)
            if module is None:
                continue
            sync, transport = module.HTTPTransport, module.AsyncHTTPTransport
            if log_calls:
                sync.handle_request = self._logging_sync(sync.handle_request)
                transport.handle_async_request = self._logging(transport.handle_async_request)
            sync.handle_request = self._watching_sync(sync.handle_request)
            transport.handle_async_request = self._watching(transport.handle_async_request)
            # Private, as there is no public place where every client's context is made; where
            # a version has moved it, contexts are merely not shared.
            inner = _import(f"{library}._transports.default")
            if share_tls and hasattr(inner, "create_ssl_context"):
                inner.create_ssl_context = self._sharing(inner.create_ssl_context)

    def take_log(self, key: str) -> dict[str, Any] | None:
        """What an episode sent, as JSON; None: nothing that was seen."""
        log = self.logs.pop(key, None)
        return log.to_json() if log is not None else None

    @contextlib.contextmanager
    def _logged(self, request: Any) -> Iterator[LoggedCall]:
        began = time.perf_counter()
        log = self.logs.get(EPISODE_KEY.get()) or CallLog("client")  # its episode has ended
        # Without the query, in which some servers take a key.
        call = log.begin(f"{request.method} {request.url.host}{request.url.path}")
        log.add_messages(call, messages_of(request))
        try:
            yield call
        except BaseException as error:
            call.error = log.cut(f"{type(error).__name__}: {error}", 400)
            raise
        finally:
            call.seconds = round(time.perf_counter() - began, 6)

    def _logging(self, original: _Handler) -> _Handler:
        async def handle_async_request(transport: Any, request: Any) -> Any:
            with self._logged(request) as call:
                response = await original(transport, request)
                call.status = response.status_code
                return response

        return handle_async_request

    def _logging_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def handle_request(transport: Any, request: Any) -> Any:
            with self._logged(request) as call:
                response = original(transport, request)
                call.status = response.status_code
                return response

        return handle_request

    def _watching(self, original: _Handler) -> _Handler:
        async def handle_async_request(transport: Any, request: Any) -> Any:
            seen = HttpCall()
            self.calls.append(seen)
            trace = _tracer(seen, time.perf_counter(), request.extensions.get("trace"))
            request.extensions = {**request.extensions, "trace": trace}
            response = await original(transport, request)
            seen.status = response.status_code
            return response

        return handle_async_request

    def _watching_sync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _on_event_loop():
                return original(*args, **kwargs)
            began = time.perf_counter()
            seen = HttpCall(place=place_of(sys._getframe()))
            self.calls.append(seen)
            try:
                response = original(*args, **kwargs)
            finally:
                seen.blocking = time.perf_counter() - began
            seen.status = int(getattr(response, "status_code", 0) or getattr(response, "status", 0))
            return response

        return call

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
    """Not so in `asyncio.to_thread`, where a synchronous client does no harm."""
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
