"""The relay of several servers: the least loaded is asked, one that fails is put aside.

It listens on a free port of 127.0.0.1, in a thread of its own, so that whatever speaks to one
server (agents, the recording proxy, the comparison's client) speaks to many. It adds no key: what
a client sends is what the server gets.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from shakedown.core.errors import CannotJudgeError
from shakedown.core.verdict import Finding
from shakedown.inference.secret import bearer
from shakedown.inference.upstream import models
from shakedown.inference.upstream.calls import AT_ONCE, Upstream

_LARGEST = 1 << 26  # bytes of a request
_BACKLOG = 4096  # a thousand episodes connect at once
_STUCK = 100_000  # keys whose server is remembered
_MISSES = 2  # looks at a server in a row without an answer until it counts as hanging
# Of one connection, or set anew for the next one.
_HOPS = frozenset({"host", "content-length", "transfer-encoding", "connection", "keep-alive"})
_FAILED = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass
class _Server:
    """`why` it is put aside; empty: it is not. `gone` is set then, for requests in flight on it."""

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
    """Use `shakedown.inference.relay.relayed`.

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
        self._ready, self._fault = threading.Event(), ""
        self.url = ""

    @property
    def all_aside(self) -> bool:
        return all(server.why for server in self._servers)

    def told(self) -> str:
        """Why no server answers."""
        each = "; ".join(f"{server.url}: {server.why}" for server in self._servers)
        return f"none of the {len(self._servers)} servers answers: {each}"

    def findings(self) -> list[Finding]:
        """One a server: a warning where it was put aside."""
        return [_finding(server) for server in self._servers]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Listen while the block runs.

        Raises:
            CannotJudgeError: no port could be opened.
        """
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        thread = threading.Thread(target=self._run, args=(loop, stop), daemon=True)
        thread.start()
        self._ready.wait()
        try:
            if self._fault:
                raise CannotJudgeError(f"cannot listen on 127.0.0.1: {self._fault}")
            yield
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)
            thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._serve(stop))
            except OSError as error:
                self._fault = str(error)
            finally:
                self._ready.set()

    async def _serve(self, stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A client that is gone ends its request in the server too.
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        async with Upstream(auto_decompress=False) as self._upstream:
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0, backlog=_BACKLOG).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                self._ready.set()
                looks = [asyncio.create_task(self._watch(server)) for server in self._servers]
                await stop.wait()
                for look in looks:
                    look.cancel()
            finally:
                await runner.cleanup()

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
            async with self._upstream.ask(
                "GET",
                f"{server.url}{models.PATH}",
                seconds=self._patience,
                pauses=AT_ONCE,
                headers=self._headers,
            ) as reply:
                return f"HTTP {reply.status}" if reply.status >= 500 else ""
        except TimeoutError:
            return f"no answer within {self._patience:g} s"
        except _FAILED as error:
            return _text(error)

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
        """An error where another server gave an answer is the server's own."""
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
            if len(self._kept) > _STUCK:
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
            why = server.why if gone.is_set() else _text(error)
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
                except OSError:  # the client is gone, which is no fault of the server
                    return response
            return response


async def _unless(
    gone: asyncio.Event, asked: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
    """What is asked for.

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


def _text(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()


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
