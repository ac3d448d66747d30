"""The server that agents talk to where replies cannot be recorded: passes all on unchanged.

What comes back is judged by its bytes: status, HTML, a body or stream that is cut off.
"""

import contextlib
import json
import re
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from shakedown.agents.endpoint import HEADER
from shakedown.agents.wire import ENGINE, TO_ENGINE, fault_of
from shakedown.core.http import LARGEST_REQUEST
from shakedown.inference.upstream import Upstream
from shakedown.rollout.call_entry import CallEntry
from shakedown.rollout.engine_replies import CallError, told
from shakedown.rollout.episode_server import EpisodeServer, episode_key
from shakedown.rollout.protocols.base import openai_error

_ENDS = 512  # bytes of a stream's end that tell whether it is one
# The last events of chat completions, messages and responses.
_LAST = (
    b"[DONE]",
    b"message_stop",
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
)
_VERSIONS = re.compile(r"^.*?/?v1/")  # what stands before a protocol's path
# Of one connection alone, or of a body as it was sent.
_OF_CONNECTION = (
    "host",
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "content-encoding",
    "accept-encoding",
)
_KEYS = ("authorization", "x-api-key")


class AgentRelay(EpisodeServer):
    """The relay. Calls outside of an episode, or after its end, are passed on and not counted.

    Args:
        base_url: of the server, with its path.
        api_key: the server's own, which replaces the keys that agents are given.
        log_calls: as for `EpisodeServer`.
    """

    seen_by = "relay"

    def __init__(self, base_url: str, api_key: str, *, log_calls: bool = False) -> None:
        server = urlsplit(base_url)
        super().__init__(server.path, Upstream(read_bufsize=LARGEST_REQUEST), log_calls=log_calls)
        self._origin, self._key = f"{server.scheme}://{server.netloc}", api_key

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key, log, wire = episode_key(request), None, None
        if request.method == "POST":
            log, wire = self._logs.get(key), self._wires.get(key)
        entry = CallEntry(key, log, _VERSIONS.sub("", request.match_info["path"]), wire)
        try:
            return await self._passed_on(request, entry)
        except (CallError, TimeoutError, aiohttp.ClientError) as error:
            failed = told(error, 0.0)
            entry.ended(failed.status, str(failed), failed.fault, failed.hop)
            return web.json_response(openai_error(failed.status, str(failed)), status=failed.status)
        finally:
            entry.left()

    async def _passed_on(self, request: web.Request, entry: CallEntry) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise CallError(413, f"the body has more than {LARGEST_REQUEST} bytes") from error
        entry.sent({"messages": messages_of(body)})
        path = request.raw_path.removeprefix(f"/e/{request.match_info.get('key')}")
        url = URL(self._origin + path, encoded=True)  # as the agent wrote it
        headers = self._headers(request, entry.key)
        async with self._engine.ask(
            request.method, url, lost=entry.lost, headers=headers, data=body or None
        ) as reply:
            entry.heard()
            response = web.StreamResponse(status=reply.status, headers=_passed(reply.headers))
            await response.prepare(request)
            judged = RelayedReply(entry, reply.status, reply.content_type)
            try:
                async with contextlib.aclosing(judged.watched(reply)) as parts:
                    async for data in parts:
                        await response.write(data)
            except aiohttp.ClientError:
                # As the server did: the agent sees a reply without its end.
                if request.transport is not None:
                    request.transport.close()
                return response
        await response.write_eof()
        return response

    def _headers(self, request: web.Request, key: str) -> CIMultiDict[str]:
        headers = _passed(request.headers)
        for name in _KEYS:
            given = headers.get(name, "")
            for ours in (self.api_key, *([key] if key in self._episodes else [])):
                given = given.replace(ours, self._key)
            if given:
                headers[name] = given
        if key in self._episodes:
            headers[HEADER] = key  # a relay of several servers keeps an episode with one of them
        return headers


class RelayedReply:
    """Judges a reply while it is passed on, and ends the call's entry with it."""

    def __init__(self, entry: CallEntry, status: int, kind: str) -> None:
        self._entry, self._status, self._kind = entry, status, kind.lower()
        self._stream = "event-stream" in self._kind
        self._body, self._tail, self._size = bytearray(), b"", 0

    async def watched(self, reply: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """The reply's bytes.

        Raises:
            aiohttp.ClientError: it breaks off.
        """
        try:
            async for data in reply.content.iter_any():
                self._feed(data)
                yield data
        except aiohttp.ClientError as error:
            self._end(error)
            raise
        except BaseException:  # the agent has left
            if self._status >= 400 or (self._stream and self._finished):
                self._end()
            raise
        self._end()

    def _feed(self, data: bytes) -> None:
        self._size += len(data)
        self._tail = (self._tail + data)[-_ENDS:]
        self._body += data[: max(LARGEST_REQUEST - len(self._body), 0)]
        if self._stream:
            *lines, rest = self._body.split(b"\n")
            self._body = bytearray(rest)
            for line in lines:
                chunk = _object(line.removeprefix(b"data:")) if line.startswith(b"data:") else None
                if chunk is not None:
                    self._show(chunk)

    @property
    def _finished(self) -> bool:
        return any(mark in self._tail for mark in _LAST)

    def _end(self, error: aiohttp.ClientError | None = None) -> None:
        status, entry = self._status, self._entry
        if status >= 400:
            entry.ended(status, *self._refusal(), ENGINE)
        elif error is not None:
            said = f"after {self._size} bytes: {type(error).__name__} {error}".strip()
            entry.ended(status, said, fault_of(error, answered=True), TO_ENGINE)
        elif self._stream and not self._finished:
            broke = f"the stream broke off after {self._size} bytes"
            entry.ended(status, broke, "truncated", TO_ENGINE)
        elif fault := "" if self._stream else self._fault():
            entry.ended(status, fault, "bad_reply", ENGINE)
        else:
            entry.ended(status)

    def _fault(self) -> str:
        """The fault of a whole body; empty for a good one."""
        if self._size > LARGEST_REQUEST:
            return ""
        body = _object(self._body)
        if body is None:
            kind = self._kind or "no type"
            return f"status {self._status} with {kind}, which is not a JSON object: {self._text()}"
        if body.get("error"):
            return f"status {self._status} with error {body['error']}"
        self._show(body)
        return ""

    def _show(self, body: dict[str, Any]) -> None:
        """A reply, or an event of one; in other protocols than chat completions its id alone."""
        self._entry.add(body)
        # Of an Anthropic and a responses' stream it stands in the first event's object.
        inner = body.get("message") or body.get("response")
        found = body.get("id") or (inner.get("id") if isinstance(inner, dict) else None)
        self._entry.named(str(found or ""))

    def _refusal(self) -> tuple[str, str]:
        """(what a server says in an error's body, the cause)."""
        body = _object(self._body) or {}
        said = body.get("error") or body.get("message") or self._text()
        message = str(said.get("message") or said) if isinstance(said, dict) else str(said)
        unknown = self._status == 404 and "model" in message.lower()
        return (f"status 404: {message}", "unknown_model") if unknown else (message, "api_status")

    def _text(self) -> str:
        return bytes(self._body[:200]).decode(errors="replace")


def messages_of(body: bytes) -> list[Any]:
    """The messages of a request's body in any usual protocol; empty where it asks no model.

    Chat completions and Anthropic's messages have `messages`, responses have `input`; what stands
    beside them as `system` or `instructions` comes first.
    """
    asked = _object(body) or {}
    messages = asked.get("messages") or asked.get("input") or asked.get("prompt") or []
    found = messages if isinstance(messages, list) else [{"role": "user", "content": messages}]
    system = asked.get("system") or asked.get("instructions")
    return [{"role": "system", "content": system}, *found] if system else found


def _passed(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of the message, without those of its connection."""
    found = CIMultiDict(headers)
    for name in _OF_CONNECTION:
        found.popall(name, None)
    return found


def _object(text: bytes | bytearray) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None
