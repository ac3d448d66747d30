"""A relay before an inference server whose wire is in trouble, as a key of the wire says."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

PROBES = 1  # calls by which `agent run` finds out whether replies can be recorded
# What the wire does with the n-th POST, from 1: pass, error, busy (429), html, cut (half of the
# reply), reset, hang, die (and nobody listens any more).
Wire = Callable[[int], str]


def after_probe(what: str) -> Wire:
    return lambda number: what if number > PROBES else "pass"


def at_first(what: str) -> Wire:
    return lambda _number: what


def some(what: str) -> Wire:
    return lambda number: what if number > PROBES and number % 3 == 0 else "pass"


def from_the_tenth(what: str) -> Wire:
    return lambda number: what if number >= 10 else "pass"


class Relay:
    """A server before the real one, whose wire has the trouble; runs in a thread of its own."""

    def __init__(self, url: str, wire: Wire) -> None:
        self._url, self._wire, self._numbers = url, wire, itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._dead, self.url = False, ""

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its URL."""
        started = threading.Event()
        thread = threading.Thread(target=self._run, args=(started,))
        thread.start()
        started.wait(30.0)
        try:
            yield self.url
        finally:
            self._loop.call_soon_threadsafe(self._over.set)
            thread.join()

    def _run(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        self._over = asyncio.Event()
        async with aiohttp.ClientSession() as self._session:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            self._site = web.TCPSite(runner, "127.0.0.1", 0)
            await self._site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await self._over.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        what = self._wire(next(self._numbers)) if request.method == "POST" else "pass"
        if what == "die" and not self._dead:
            self._dead = True
            await self._site.stop()  # nobody listens any more, as after a kill
        if self._dead or what == "reset":
            return self._abort(request)
        if what == "hang":
            await self._over.wait()
        if what == "error":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        if what == "busy":
            return web.json_response({"error": {"message": "too many requests"}}, status=429)
        if what == "html":
            return web.Response(text="<html><body>Log in</body></html>", content_type="text/html")
        headers = {"Authorization": request.headers.get("Authorization", "")}
        sent = await request.read() if request.method == "POST" else None
        kind = {"Content-Type": "application/json"}
        async with self._session.request(
            request.method, self._url + request.path, headers=headers | kind, data=sent
        ) as reply:
            body = await reply.read()
            kind = {"Content-Type": reply.headers["Content-Type"]}
        if what != "cut":
            return web.Response(body=body, status=reply.status, headers=kind)
        length = (
            {} if "event-stream" in kind["Content-Type"] else {"Content-Length": str(len(body))}
        )
        response = web.StreamResponse(headers=kind | length)
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        return self._abort(request)

    @staticmethod
    def _abort(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()  # nobody gets it
