"""The server that agents talk to in training: passes calls on to vLLM and records them.

Whatever protocol an agent speaks (`protocols/`), the engine is asked for one chat completion.
Each episode has a key. A call belongs to the episode whose key stands in its URL
(`/e/KEY/v1/chat/completions`), else in the header that the agent's worker sets, else in its
bearer token or `x-api-key`. Only a call whose reply reached the agent is kept. Agents never see
the engine's key.
"""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Self

import aiohttp
from aiohttp import web

from shakedown.agents.episode_tag import EPISODE_KEY, HEADER
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
from shakedown.rollout.protocols import PROTOCOLS
from shakedown.rollout.protocols.base import Protocol, Reply
from shakedown.rollout.request_gate import RequestGate

_LARGEST = 1 << 26  # bytes of a request, and of one line of a stream
_BACKLOG = 4096  # a thousand episodes connect at once
_CONNECT_SECONDS = 60.0
_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError)  # what an engine may tell
_VERSIONS = re.compile(r"(v1/)*")  # clients add it to a base URL that ends in it


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
        model: the name that the engine serves, whatever name an agent gives; empty: the agent's.

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
        model: str = "",
    ) -> None:
        self._model = {"model": model} if model else {}
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
        path = _VERSIONS.sub("", request.match_info["path"], count=1)
        protocol = PROTOCOLS.get(path, PROTOCOLS["chat/completions"])
        try:
            if (request.method, path) == ("GET", "models"):
                self._check_key(request, self.api_key)
                return await self._models()
            if request.method != "POST" or path not in PROTOCOLS:
                raise _CallError(
                    404,
                    f"{request.method} {request.match_info['path']:.80}: in training an agent can "
                    f"only POST {', '.join(f'/v1/{name}' for name in PROTOCOLS)}, which is what "
                    "is recorded",
                )
            return await self._passed_on(request, self._check_key(request), protocol)
        except RefusedCallError as error:
            status, message = 400, str(error)
        except _CallError as error:
            status, message = error.status, str(error)
        except RecursionError:
            status, message = 400, "the body is nested too deeply"
        except TimeoutError:
            status, message = 504, f"the engine did not answer within {self._times.total:g} s"
        except aiohttp.ClientError as error:
            status, message = 502, f"the engine: {type(error).__name__} {error}".strip()
        return web.json_response(protocol.reply.error(status, message), status=status)

    async def _passed_on(
        self, request: web.Request, key: str, protocol: Protocol
    ) -> web.StreamResponse:
        sent, wanted, changed = prepare(protocol.to_chat(await _body(request)), self._sampling)
        self._say(changed)
        if not wanted.stream:
            return await self._answered(key, sent | self._model, wanted, protocol.reply())
        return await self._streamed(request, key, sent | self._model, wanted, protocol.reply())

    def _check_key(self, request: web.Request, *others: str) -> str:
        """The key of the call: an episode's, or one of `others`.

        Raises:
            _CallError: it is none.
        """
        sent = request.headers
        token = sent.get("Authorization", "").removeprefix("Bearer ").strip()
        told = (request.match_info.get("key"), sent.get(HEADER), sent.get("x-api-key"), token)
        key = next(filter(None, told), "")
        if key not in self._episodes and key not in others:
            raise _CallError(
                403,
                "this call belongs to no running episode: use base_url or api_key of run's "
                "keyword arguments, and make no calls after run has returned",
            )
        EPISODE_KEY.set(key)  # of this call's task
        return key

    async def _answered(
        self, key: str, sent: Body, wanted: ReplyOptions, shown: Reply
    ) -> web.StreamResponse:
        async with self._asked(sent) as (reply, version):
            content = await reply.read()
            _check_status(reply, content)
        try:
            body = json.loads(content)
            calls = read_reply(body, version)
            answer = shown.whole(clean(body, wanted))
        except _MALFORMED as error:
            raise _CallError(502, f"not recorded: {error}") from error
        self._keep(key, calls)
        return web.json_response(answer)

    async def _streamed(
        self, request: web.Request, key: str, sent: Body, wanted: ReplyOptions, shown: Reply
    ) -> web.StreamResponse:
        """Written apart from what is read: an agent that does not read holds no update up."""
        # The queue has no limit of its own: a reply is at most `max_tokens` chunks.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        events: asyncio.Queue[bytes] = asyncio.Queue()
        async with self._asked(sent) as (reply, version):
            if reply.status != 200:
                _check_status(reply, await reply.read())
            await response.prepare(request)
            writing = asyncio.create_task(_write(response, events))
            try:
                async for event in self._events(reply, key, wanted, version, shown):
                    events.put_nowait(event)
                events.put_nowait(b"")
            except BaseException:
                writing.cancel()
                raise
        await writing
        return response

    @contextlib.asynccontextmanager
    async def _asked(self, sent: Body) -> AsyncIterator[tuple[aiohttp.ClientResponse, int]]:
        """The engine's reply and the version that writes it; inside, no weights are loaded."""
        async with self.gate.request():
            version = self._version()
            # A relay of several servers keeps an episode with one of them by it.
            episode = {HEADER: EPISODE_KEY.get()}
            url = self._upstream + _CHAT
            async with self._session.post(url, json=sent, headers=episode) as reply:
                yield reply, version

    async def _events(
        self,
        reply: aiohttp.ClientResponse,
        key: str,
        wanted: ReplyOptions,
        version: int,
        shown: Reply,
    ) -> AsyncIterator[bytes]:
        """Chunks' events as they come, but the last ones only once the call is recorded."""
        record, held = StreamRecord(version), list[Body]()
        try:
            async for chunk in _chunks(reply):
                record.add(chunk)
                if record.finished(wanted.choices):
                    held.append(chunk)
                    continue
                for event in shown.add(clean(chunk, wanted)):
                    yield event
            last = [
                event
                for chunk in held
                if chunk.get("choices") or wanted.usage
                for event in shown.add(clean(chunk, wanted))
            ]
            last += shown.end()
            self._keep(key, record.calls())
        except (aiohttp.ClientError, TimeoutError, _CallError, *_MALFORMED) as error:
            last = [shown.failed(502, f"not recorded: {error}")]
        for event in last:
            yield event

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


async def _body(request: web.Request) -> Body:
    """The JSON object that was sent.

    Raises:
        _CallError: it is none.
    """
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise _CallError(400, f"the body has more than {_LARGEST} bytes") from error
    except ValueError as error:
        raise _CallError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise _CallError(400, "the body is no JSON object")
    return body


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


async def _write(response: web.StreamResponse, events: asyncio.Queue[bytes]) -> None:
    """Write events up to an empty one."""
    while event := await events.get():
        await response.write(event)


def _check_status(reply: aiohttp.ClientResponse, content: bytes) -> None:
    """Hand the engine's own error on.

    Raises:
        _CallError: there is one.
    """
    if reply.status == 200:
        return
    try:
        told = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        told = None
    message = str(told) if told else f"the engine: {content.decode(errors='replace')[:500]}"
    raise _CallError(reply.status, message)
