"""The server that agents talk to in training: passes calls on to vLLM and records them.

Whatever protocol an agent speaks (`protocols/`), the engine is asked for one chat completion. Only
a call whose reply reached the agent is kept.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from shakedown.agents.endpoint import HEADER
from shakedown.core.http import LARGEST_REQUEST
from shakedown.inference.upstream import MODELS, Upstream
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
from shakedown.rollout.call_entry import CallEntry
from shakedown.rollout.engine_replies import (
    MALFORMED,
    CallError,
    check_status,
    chunks,
    not_recorded,
    read_object,
    told,
)
from shakedown.rollout.episode_server import EpisodeServer, episode_key
from shakedown.rollout.protocols import PROTOCOLS
from shakedown.rollout.protocols.base import Protocol, Reply

_CHAT = "/v1/chat/completions"
# Exceptions that may end a call; the agent is told which.
TOLD = (RefusedCallError, CallError, RecursionError, TimeoutError, aiohttp.ClientError)
_VERSIONS = re.compile(r"(v1/)*")  # clients add it to a base URL that ends in it


class AgentProxy(EpisodeServer):
    """The recording proxy. Calls outside of an episode, or after its end, are refused.

    Args:
        upstream: the engine's base URL without `/v1`.
        sampling: the stage's own.
        version: of the weights that the engine has.
        timeout: seconds for one call.
        api_key: what the engine asks for.
        model: the name that the engine serves, whatever name an agent gives; empty: the agent's.
        log_calls: as for `EpisodeServer`.
    """

    seen_by = "proxy"

    def __init__(
        self,
        upstream: str,
        sampling: Sampling,
        version: Callable[[], int],
        *,
        timeout: float,
        api_key: str = "",
        model: str = "",
        log_calls: bool = False,
    ) -> None:
        super().__init__(
            "/v1", Upstream(api_key, read_bufsize=LARGEST_REQUEST), log_calls=log_calls
        )
        self._model = {"model": model} if model else {}
        self._url, self._sampling, self._version = upstream, sampling, version
        self._seconds = timeout
        self._said: set[str] = set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = _VERSIONS.sub("", request.match_info["path"], count=1)
        protocol = PROTOCOLS.get(path, PROTOCOLS["chat/completions"])
        key = episode_key(request)
        if path == "models":
            entry = CallEntry(key, None, path)
        else:
            entry = CallEntry(key, self._logs.get(key), path, self._wires.get(key))
        try:
            if (request.method, path) == ("GET", "models"):
                self._check_key(key, self.api_key)
                return await self._models()
            if request.method != "POST" or path not in PROTOCOLS:
                raise CallError(
                    404,
                    f"{request.method} {request.match_info['path']:.80}: in training an agent can "
                    f"only POST {', '.join(f'/v1/{name}' for name in PROTOCOLS)}, which is what "
                    "is recorded",
                )
            self._check_key(key)
            return await self._passed_on(request, entry, protocol)
        except TOLD as error:
            failed = told(error, self._seconds)
            entry.ended(failed.status, str(failed), failed.fault, failed.hop)
            body = protocol.reply.error(failed.status, str(failed))
            return web.json_response(body, status=failed.status)
        finally:
            entry.left()

    async def _passed_on(
        self, request: web.Request, entry: CallEntry, protocol: Protocol
    ) -> web.StreamResponse:
        asked = protocol.to_chat(await _body(request))
        entry.sent(asked)
        self.history.asked(entry.key, asked.get("messages"))
        sent, wanted, changed = prepare(asked, self._sampling)
        self._say(changed)
        self._say_model(asked.get("model"))
        if not wanted.stream:
            return await self._answered(entry, sent | self._model, wanted, protocol)
        return await self._streamed(request, entry, sent | self._model, wanted, protocol.reply())

    def _check_key(self, key: str, *others: str) -> None:
        """Check that a call's key is an episode's, or one of `others`.

        Raises:
            CallError: it is neither.
        """
        if key not in self._episodes and key not in others:
            raise CallError(
                403,
                "this call belongs to no running episode: use base_url or api_key of run's "
                "keyword arguments, and make no calls after run has returned",
            )

    async def _answered(
        self, entry: CallEntry, sent: Body, wanted: ReplyOptions, protocol: Protocol
    ) -> web.StreamResponse:
        async with self._asked(protocol.to_engine(sent), entry, protocol.path) as (reply, version):
            content = await reply.read()
            check_status(reply, content)
        try:
            body = protocol.from_engine(read_object(content, reply.content_type))
            entry.add(body)
            calls = read_reply(body, version)
            answer = protocol.reply().whole(clean(body, wanted))
        except MALFORMED as error:
            raise not_recorded(error) from error
        self._keep(entry, calls)
        entry.ended(200)
        return web.json_response(answer)

    async def _streamed(
        self, request: web.Request, entry: CallEntry, sent: Body, wanted: ReplyOptions, shown: Reply
    ) -> web.StreamResponse:
        """Write in a separate task: an agent that does not read must not hold up an update."""
        # The queue has no limit of its own: a reply is at most `max_tokens` chunks.
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        events: asyncio.Queue[bytes] = asyncio.Queue()
        async with self._asked(sent, entry) as (reply, version):
            if reply.status != 200:
                check_status(reply, await reply.read())
            await response.prepare(request)
            writing = asyncio.create_task(_write(response, events))
            try:
                async for event in self._events(reply, entry, wanted, version, shown):
                    events.put_nowait(event)
                events.put_nowait(b"")
            except BaseException:
                writing.cancel()
                raise
        await writing
        return response

    @contextlib.asynccontextmanager
    async def _asked(
        self, sent: Body, entry: CallEntry, path: str = _CHAT
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, int]]:
        """The engine's reply and the version that writes it; inside, no weights are loaded."""
        async with self.gate.request():
            version = self._version()
            # A relay of several servers keeps an episode with one of them by it.
            episode = {HEADER: entry.key}
            async with self._engine.ask(
                "POST",
                self._url + path,
                seconds=self._seconds,
                lost=entry.lost,
                json=sent,
                headers=episode,
            ) as reply:
                entry.heard()
                yield reply, version

    async def _events(
        self,
        reply: aiohttp.ClientResponse,
        entry: CallEntry,
        wanted: ReplyOptions,
        version: int,
        shown: Reply,
    ) -> AsyncIterator[bytes]:
        """Chunks' events as they come, but the last ones only once the call is recorded."""
        record, held = StreamRecord(version), list[Body]()
        try:
            async for chunk in chunks(reply):
                entry.add(chunk)
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
            self._keep(entry, record.calls())
            entry.ended(200)
        except (aiohttp.ClientError, TimeoutError, CallError, *MALFORMED) as error:
            failed = not_recorded(error)
            last = [shown.failed(failed.status, str(failed))]
            entry.ended(failed.status, str(failed), failed.fault, failed.hop)
        for event in last:
            yield event

    async def _models(self) -> web.StreamResponse:
        url = self._url + MODELS
        async with self._engine.ask("GET", url, seconds=self._seconds) as reply:
            return web.Response(
                body=await reply.read(), status=reply.status, content_type="application/json"
            )

    def _keep(self, entry: CallEntry, calls: list[Call]) -> None:
        """Add to the episode.

        Raises:
            CallError: it has ended: nobody would be rewarded for the call.
        """
        if entry.key not in self._episodes:
            raise CallError(403, "the episode ended before this call did")
        self._episodes[entry.key] += calls
        entry.recorded(calls)
        self.history.sampled(entry.key, calls)
        self.recorded += 1

    def _say_model(self, named: object) -> None:
        """Say once per foreign name that it is replaced: without the proxy it would fail."""
        served, name = self._model.get("model", ""), f"{named!s:.80}"
        if served and named and name != served and f"model {name}" not in self._said:
            self._said.add(f"model {name}")
            print(f"the agent names the model {name!r}: {served!r} answers, as in training")

    def _say(self, changed: list[str]) -> None:
        for each in changed:
            name = each.split(" ", 1)[0]
            if name not in self._said:
                self._said.add(name)
                most = self._sampling.max_tokens
                length = "" if most is None else f"max_tokens at most {most}, "
                print(
                    f"the agent asks for {each}: in training temperature is "
                    f"{self._sampling.temperature:g}, {length}and nothing else narrows the "
                    "sampling",
                    flush=True,
                )


async def _body(request: web.Request) -> Body:
    """The JSON object that was sent.

    Raises:
        CallError: it is not a JSON object.
    """
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise CallError(400, f"the body has more than {LARGEST_REQUEST} bytes") from error
    except ValueError as error:
        raise CallError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise CallError(400, "the body is not a JSON object")
    return body


async def _write(response: web.StreamResponse, events: asyncio.Queue[bytes]) -> None:
    """Write events up to an empty one."""
    while event := await events.get():
        await response.write(event)
