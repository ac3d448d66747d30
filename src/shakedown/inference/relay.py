"""Several servers behind one URL: requests go to the least loaded; a failing one is put aside.

It listens on a free port of 127.0.0.1, in a thread of its own, so that whatever speaks to one
server (agents, the recording proxy, the comparison's client) speaks to many. It adds no key: the
server gets exactly what a client sends.
"""

import asyncio
import contextlib
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from shakedown.core.errors import CannotJudgeError, ServerError, UsageError
from shakedown.core.http import LOOPBACK, NoAnswerError, application, in_thread, listening
from shakedown.core.http import why as why_of
from shakedown.core.verdict import Finding
from shakedown.inference.auth import bearer
from shakedown.inference.upstream import AT_ONCE, MODELS, Upstream

_MAX_STICKY_KEYS = 100_000  # keys whose server is remembered
_MISSES = 2  # looks at a server in a row without an answer until it counts as hanging
# Of one connection, or set anew for the next one.
_HOPS = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive"})
_FAILED = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True)
class Servers:
    """The URL that clients are given; `relay` is None with a single server."""

    url: str
    relay: "Relay | None" = None

    def findings(self) -> list[Finding]:
        return self.relay.findings() if self.relay else []

    def explained(self, error: ServerError) -> ServerError:
        """The error, with what became of each server where all of several are put aside."""
        if self.relay is None or not self.relay.all_aside:
            return error
        return ServerError(f"{self.relay.told()}; {error.args[0]}", hint=error.hint)


@contextlib.contextmanager
def relayed(
    text: str, api_key: str = "", *, sticky: str = "", every: float = 2.0, patience: float = 10.0
) -> Iterator[Servers]:
    """One URL for the servers of `URL` or `URL,URL`; a single one is left as it is.

    Raises:
        UsageError: several, and one of them is not a valid URL or is listed twice.
        ServerError: as the block does; where all servers are put aside it says so.
    """
    if "," not in text:
        yield Servers(text)
        return
    urls = split_urls(text)
    relay = Relay(urls, api_key, sticky=sticky, every=every, patience=patience)
    with relay.serving():
        servers = Servers(relay.url, relay)
        try:
            yield servers
        except ServerError as error:
            if not relay.all_aside:
                raise
            raise servers.explained(error) from error


def split_urls(text: str) -> list[str]:
    """The URLs of `URL,URL`, without `/v1`.

    Raises:
        UsageError: one is not a valid URL, or is listed twice.
    """
    urls = [each.strip().rstrip("/").removesuffix("/v1") for each in text.split(",")]
    for url in urls:
        if not url.startswith(("http://", "https://")) or urls.count(url) > 1:
            what = "is listed twice" if url and urls.count(url) > 1 else "is not a valid URL"
            raise UsageError(
                f"{text!r}: {url!r} {what}: expected http://HOST:PORT,http://HOST:PORT"
            )
    return urls


@dataclass
class _Server:
    """One server. `why` it is put aside, or empty; `gone` is then set for its open requests."""

    url: str
    why: str = ""
    first: str = ""
    aside: int = 0
    running: int = 0
    answered: int = 0
    moved: int = 0
    misses: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def put_aside(self, why: str) -> None:
        if not self.why:
            self.aside += 1
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self.first = self.first or f"at {now}: {why}"
        self.why = why
        self.gone.set()

    def take_back(self) -> None:
        self.why, self.misses = "", 0
        self.gone = asyncio.Event()


class _FailedError(Exception):
    """The server failed before anything was handed on; `reply`: what it answered, if it did."""

    def __init__(self, why: str, reply: web.Response | None = None) -> None:
        super().__init__(why)
        self.reply = reply


class Relay:
    """Use `relayed`.

    Args:
        urls: of the servers, without `/v1`.
        api_key: to look at them with.
        sticky: a header; requests with the same value go to the same server, for its prefix cache.
        every: seconds between two looks at a server; `patience`: seconds that one may take.
    """

    def __init__(
        self, urls: Sequence[str], api_key: str, *, sticky: str, every: float, patience: float
    ) -> None:
        self._servers = [_Server(url) for url in urls]
        self._headers, self._sticky = bearer(api_key), sticky
        self._every, self._patience = every, patience
        self._kept: OrderedDict[str, _Server] = OrderedDict()
        self.url = ""

    @property
    def all_aside(self) -> bool:
        return all(server.why for server in self._servers)

    def told(self) -> str:
        """Why no server answers."""
        each = "; ".join(f"{server.url}: {server.why}" for server in self._servers)
        return f"none of the {len(self._servers)} servers answers: {each}"

    def findings(self) -> list[Finding]:
        """One finding per server: a warning where it was put aside."""
        return [_finding(server) for server in self._servers]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Listen while the block runs.

        Raises:
            CannotJudgeError: no port could be opened.
        """
        try:
            bound = socket.create_server((LOOPBACK, 0))
        except OSError as error:
            raise CannotJudgeError(f"cannot listen on {LOOPBACK}: {error}") from error
        with bound, in_thread(self._answering(bound)):
            yield

    @contextlib.asynccontextmanager
    async def _answering(self, bound: socket.socket) -> AsyncIterator[None]:
        async with (
            Upstream(auto_decompress=False) as self._upstream,
            listening(application(self._handle), bound) as port,
        ):
            self.url = f"http://{LOOPBACK}:{port}"
            looks = [asyncio.create_task(self._watch(server)) for server in self._servers]
            try:
                yield
            finally:
                for look in looks:
                    look.cancel()

    async def _watch(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(self._every)
            why = await self._look(server)
            server.misses = server.misses + 1 if why else 0
            if not why and server.why:
                server.take_back()
            elif server.misses >= _MISSES:
                server.put_aside(why)

    async def _look(self, server: _Server) -> str:
        """Why the server does not answer; empty when it does."""
        try:
            answer = await self._upstream.fetch(
                "GET",
                f"{server.url}{MODELS}",
                seconds=self._patience,
                pauses=AT_ONCE,
                headers=self._headers,
            )
        except NoAnswerError as error:
            return error.why
        return f"HTTP {answer.status}" if answer.status >= 500 else ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        failed: dict[str, _FailedError] = {}
        while server := self._choose(request.headers.get(self._sticky, ""), failed):
            server.running += 1
            try:
                response = await self._ask(server, request, body)
            except _FailedError as error:
                failed[server.url] = error
                if error.reply is None:
                    server.put_aside(str(error))
            else:
                server.answered += 1
                self._answered_elsewhere(failed)
                return response
            finally:
                server.running -= 1
        # An error of all servers is the request's own: its sender is to see it.
        told = [error.reply for error in failed.values() if error.reply is not None]
        if told:
            return told[-1]
        # As a server that is gone: every client knows what to do then.
        _cut(request)
        return web.Response(status=502)

    def _answered_elsewhere(self, failed: dict[str, _FailedError]) -> None:
        """Count an error against its server where another one answered the request."""
        for server in self._servers:
            if server.url in failed:
                server.moved += 1
                server.put_aside(str(failed[server.url]))

    def _choose(self, key: str, failed: dict[str, _FailedError]) -> _Server | None:
        able = [each for each in self._servers if not each.why and each.url not in failed]
        if not able:
            return None
        kept = self._kept.get(key)
        if kept is not None and kept in able:
            return kept
        found = min(able, key=lambda each: (each.running, each.answered))
        if key:
            self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > _MAX_STICKY_KEYS:
                self._kept.popitem(last=False)
        return found

    async def _ask(self, server: _Server, request: web.Request, body: bytes) -> web.StreamResponse:
        """Hand a request on, unless its server is put aside before it answers.

        Raises:
            _FailedError: nothing was handed on yet: another server may be asked.
        """
        begun: list[web.StreamResponse] = []
        gone = server.gone
        try:
            return await _unless(gone, self._hand_on(server, request, body, begun))
        except _FAILED as error:
            why = server.why if gone.is_set() else why_of(error)
            if not begun:
                raise _FailedError(why) from error
            server.put_aside(why)
            _cut(request)
            return begun[0]

    async def _hand_on(
        self, server: _Server, request: web.Request, body: bytes, begun: list[web.StreamResponse]
    ) -> web.StreamResponse:
        async with self._upstream.ask(
            request.method,
            server.url + request.path_qs,
            pauses=AT_ONCE,  # then another server is asked
            headers=_passed(request.headers),
            data=body,
        ) as reply:
            headers = _passed(reply.headers)
            if "event-stream" not in reply.headers.get("Content-Type", ""):
                whole = web.Response(body=await reply.read(), status=reply.status, headers=headers)
                if reply.status >= 500:
                    raise _FailedError(f"HTTP {reply.status}", whole)
                return whole
            response = web.StreamResponse(status=reply.status, headers=headers)
            begun.append(response)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                try:
                    await response.write(chunk)
                except OSError:  # the client is gone, which is not the server's fault
                    return response
            return response


async def _unless(
    gone: asyncio.Event, asked: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
    """The awaited result, unless the server goes away first.

    Raises:
        TimeoutError: the server is gone before it has come.
    """
    task, end = asyncio.create_task(asked), asyncio.create_task(gone.wait())
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        end.cancel()
        task.cancel()
        await asyncio.gather(task, end, return_exceptions=True)


def _passed(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOPS}


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


def _finding(server: _Server) -> Finding:
    if not server.aside:
        return Finding(
            "server", "pass", "role", server.url, measured=f"{server.answered} requests answered"
        )
    now = "still aside" if server.why else "back in use"
    times = "once" if server.aside == 1 else f"{server.aside} times, first"
    return Finding(
        check="server",
        status="warn",
        scope="role",
        subject=server.url,
        measured=f"put aside {times} {server.first}; {server.moved} requests went to another "
        f"server, {server.answered} were answered; {now}",
        expected="answers all the time",
        blame="environment",
        remedy="read its log: shakedown serve status FOLDER",
    )
