"""The server that agents talk to in training: passes chat calls on to vLLM and records them.

Each episode has a key. A call belongs to the episode whose key stands in its URL
(`/e/KEY/v1/chat/completions`), else in the header that the agent's worker sets, else in its
bearer token. Only a call whose reply reached the agent is kept. Agents never see the engine's key.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Self

import aiohttp
from aiohttp import web

from shakedown.agents.episode_tag import HEADER
from shakedown.inference.secret import bearer
from shakedown.rollout.agent_calls import (
    Body,
    Call,
    RefusedCallError,
    ReplyOptions,
    Sampling,
    StreamRecord,
    clean,
    prepare,
    read_reply,
)
from shakedown.rollout.request_gate import RequestGate

_LARGEST = 1 << 26  # bytes of a request, and of one line of a stream
_BACKLOG = 4096  # a thousand episodes connect at once
_CONNECT_SECONDS = 60.0
_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"


class _CallError(Exception):
    """What the agent is told instead of a reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AgentProxy:
    """Use it as `async with AgentProxy(...) as proxy`; it listens on a free port of 127.0.0.1.

    Args:
        upstream: the engine's base URL without `/v1`.
        sampling: the stage's own.
        version: of the weights that the engine has.
        timeout: seconds for one call.
        api_key: what the engine asks for.

    `recorded` counts calls; with the proxy's own `api_key`, outside of an episode, an agent can
    ask for the models alone.
    """

    def __init__(
        self,
        upstream: str,
        sampling: Sampling,
        version: Callable[[], int],
        *,
        timeout: float,
        api_key: str = "",
    ) -> None:
        self._headers, self.api_key = bearer(api_key), secrets.token_hex(16)
        self._upstream, self._sampling, self._version = upstream, sampling, version
        self._times = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_SECONDS)
        self._episodes: dict[str, list[Call]] = {}
        self._said: set[str] = set()
        self._stack = contextlib.AsyncExitStack()
        self.gate = RequestGate()
        self.recorded = 0
        self.host, self.port = "127.0.0.1", 0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            # No limit: the engine queues calls itself, and episodes are bounded elsewhere.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=connector,
                    headers=self._headers,
                    timeout=self._times,
                    read_bufsize=_LARGEST,
                )
            )
            app = web.Application(client_max_size=_LARGEST)
            app.router.add_route("*", "/e/{key}/{path:.*}", self._handle)
            app.router.add_route("*", "/{path:.*}", self._handle)
            # A client that is gone ends its call in the engine too.
            runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, self.host, 0, backlog=_BACKLOG)
            await site.start()
            self.port = runner.addresses[0][1]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    def open(self) -> tuple[str, str]:
        """Begin an episode; returns its key and its own base URL, which ends in `/v1`."""
        key = secrets.token_hex(16)
        self._episodes[key] = []
        return key, f"http://{self.host}:{self.port}/e/{key}/v1"

    def close(self, key: str) -> list[Call]:
        """End an episode: its calls in the order in which they ended; later ones are refused."""
        return self._episodes.pop(key, [])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if (request.method, _path(request)) == ("GET", _MODELS):
                self._check_key(request, self.api_key)
                return await self._models()
            key, body = await self._checked(request)
            sent, wanted, changed = prepare(body, self._sampling)
            self._say(changed)
            passed_on = self._streamed if wanted.stream else self._answered
            return await passed_on(request, key, sent, wanted)
        except RefusedCallError as error:
            return _error(400, str(error))
        except _CallError as error:
            return _error(error.status, str(error))
        except TimeoutError:
            return _error(504, f"the engine did not answer within {self._times.total:g} s")
        except aiohttp.ClientError as error:
            return _error(502, f"the engine: {type(error).__name__} {error}".strip())

    async def _checked(self, request: web.Request) -> tuple[str, Body]:
        """The episode and the body of a chat call.

        Raises:
            _CallError: it is none.
        """
        if (request.method, _path(request)) != ("POST", _CHAT):
            raise _CallError(
                404,
                f"{request.method} {_path(request)}: in training an agent can only POST {_CHAT}, "
                "which is what is recorded",
            )
        key = self._check_key(request)
        try:
            body = await request.json()
        except ValueError as error:
            raise _CallError(400, f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise _CallError(400, "the body is no JSON object")
        return key, body

    def _check_key(self, request: web.Request, *others: str) -> str:
        """The key of the call: an episode's, or one of `others`.

        Raises:
            _CallError: it is none.
        """
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = str(request.match_info.get("key") or request.headers.get(HEADER) or token)
        if key not in self._episodes and key not in others:
            raise _CallError(
                403,
                "this call belongs to no running episode: use base_url or api_key of run's "
                "keyword arguments, and make no calls after run has returned",
            )
        return key

    async def _answered(
        self, _: web.Request, key: str, sent: Body, wanted: ReplyOptions
    ) -> web.StreamResponse:
        async with self._asked(sent) as (reply, version):
            content = await reply.read()
            if reply.status != 200:
                return _fault(reply.status, content)
        try:
            body = json.loads(content)
            calls = read_reply(body, version)
        except ValueError as error:
            raise _CallError(502, f"not recorded: {error}") from error
        self._keep(key, calls)
        return web.json_response(clean(body, wanted))

    async def _streamed(
        self, request: web.Request, key: str, sent: Body, wanted: ReplyOptions
    ) -> web.StreamResponse:
        """Written apart from what is read: an agent that does not read holds no update up."""
        # The queue has no limit of its own: a reply is at most `max_tokens` chunks.
        shown = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        events: asyncio.Queue[bytes] = asyncio.Queue()
        async with self._asked(sent) as (reply, version):
            if reply.status != 200:
                return _fault(reply.status, await reply.read())
            await shown.prepare(request)
            writing = asyncio.create_task(_write(shown, events))
            try:
                await self._recorded(reply, key, wanted, version, events)
            except BaseException:
                writing.cancel()
                raise
        await writing
        return shown

    @contextlib.asynccontextmanager
    async def _asked(self, sent: Body) -> AsyncIterator[tuple[aiohttp.ClientResponse, int]]:
        """The engine's reply and the version that writes it; inside, no weights are loaded."""
        async with self.gate.request():
            version = self._version()
            async with self._session.post(self._upstream + _CHAT, json=sent) as reply:
                yield reply, version

    async def _recorded(
        self,
        reply: aiohttp.ClientResponse,
        key: str,
        wanted: ReplyOptions,
        version: int,
        events: asyncio.Queue[bytes],
    ) -> None:
        """Show chunks as they come, but the last ones only once the call is recorded."""
        record, held = StreamRecord(version), list[Body]()
        try:
            async for chunk in _chunks(reply):
                record.add(chunk)
                if record.finished(wanted.choices):
                    held.append(chunk)
                else:
                    events.put_nowait(_event(clean(chunk, wanted)))
            self._keep(key, record.calls())
        except (aiohttp.ClientError, TimeoutError, ValueError, _CallError) as error:
            events.put_nowait(_event(_error_body(502, f"not recorded: {error}")))
        else:
            for chunk in held:
                if chunk.get("choices") or wanted.usage:
                    events.put_nowait(_event(clean(chunk, wanted)))
            events.put_nowait(b"data: [DONE]\n\n")
        events.put_nowait(b"")

    async def _models(self) -> web.StreamResponse:
        async with self._session.get(self._upstream + _MODELS) as reply:
            return web.Response(
                body=await reply.read(), status=reply.status, content_type="application/json"
            )

    def _keep(self, key: str, calls: list[Call]) -> None:
        """Add to the episode.

        Raises:
            _CallError: it has ended: nobody would be rewarded for the call.
        """
        if key not in self._episodes:
            raise _CallError(403, "the episode ended before this call did")
        self._episodes[key] += calls
        self.recorded += 1

    def _say(self, changed: list[str]) -> None:
        for each in changed:
            name = each.split(" ", 1)[0]
            if name not in self._said:
                self._said.add(name)
                print(
                    f"the agent asks for {each}: in training temperature is "
                    f"{self._sampling.temperature:g}, max_tokens at most "
                    f"{self._sampling.max_tokens}, and nothing else narrows the sampling",
                    flush=True,
                )


def _path(request: web.Request) -> str:
    return f"/{request.match_info['path']}"


async def _chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    """The JSON objects of an event stream.

    Raises:
        ValueError: an event is no JSON object, or an error, or the stream has no end.
    """
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        chunk = json.loads(text)
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise ValueError(f"the engine's stream says {text.decode()[:300]}")
        yield chunk
    raise ValueError("the engine's stream broke off")


async def _write(shown: web.StreamResponse, events: asyncio.Queue[bytes]) -> None:
    """Write events up to an empty one."""
    while event := await events.get():
        await shown.write(event)


def _event(body: Body) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _fault(status: int, content: bytes) -> web.Response:
    """The engine's own error, in OpenAI's form."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return web.json_response(body, status=status)
    return _error(status, f"the engine: {content.decode(errors='replace')[:500]}")


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_error_body(status, message), status=status)


def _error_body(status: int, message: str) -> Body:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
