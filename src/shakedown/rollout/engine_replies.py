"""Read the engine's replies for the proxy, and name the fault of a bad one."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from shakedown.agents.wire import ENGINE, TO_ENGINE, TO_PROXY, fault_of
from shakedown.core.http import why
from shakedown.rollout.agent_calls import Body, RefusedCallError

MALFORMED = (ValueError, TypeError, AttributeError, KeyError)  # what an engine may tell


class CallError(Exception):
    """The error that the agent gets instead of a reply; `fault`: a key of `causes.CAUSES`.

    `hop`: where the call failed; by default the proxy itself refuses it.
    """

    def __init__(
        self, status: int, message: str, fault: str = "api_status", *, hop: str = TO_PROXY
    ) -> None:
        super().__init__(message)
        self.status, self.fault, self.hop = status, fault, hop


class BrokenOffError(ValueError):
    """A stream has no end."""


def told(error: BaseException, seconds: float) -> CallError:
    """The agent's error for a failed call; `seconds`: the time that the engine had."""
    if isinstance(error, CallError):
        return error
    if isinstance(error, RefusedCallError):
        return CallError(400, str(error))
    if isinstance(error, RecursionError):
        return CallError(400, "the body is nested too deeply")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return CallError(504, f"the engine: {error}", "connect_timeout", hop=TO_ENGINE)
    if isinstance(error, TimeoutError):
        message = f"the engine did not answer within {seconds:g} s"
        return CallError(504, message, "read_timeout", hop=ENGINE)
    return _cut_off(error)


def _cut_off(error: BaseException) -> CallError:
    broke = isinstance(error, aiohttp.ClientPayloadError)
    message = f"the engine: {why(error)}"
    return CallError(502, message, fault_of(error, answered=broke), hop=TO_ENGINE)


def not_recorded(error: BaseException) -> CallError:
    """The agent's error for a reply that had begun and cannot be kept."""
    hop = TO_ENGINE
    if isinstance(error, CallError):
        fault, hop = error.fault, error.hop
    elif isinstance(error, BrokenOffError):
        fault = "truncated"
    elif isinstance(error, MALFORMED):
        fault, hop = "bad_reply", ENGINE
    else:
        fault = fault_of(error, answered=True)
    return CallError(502, f"not recorded: {error}", fault, hop=hop)


def read_object(content: bytes, kind: str) -> Body:
    """A reply's body.

    Raises:
        ValueError: it is not a JSON object; `kind`, its content type, is named.
    """
    body = _parsed(content)
    if not isinstance(body, dict):
        begins = content[:200].decode(errors="replace")
        raise ValueError(f"the engine answered 200 with {kind}, not a JSON object: {begins}")
    return body


async def chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    """The JSON objects of an event stream.

    Raises:
        BrokenOffError: the stream has no end.
        ValueError: an event is not a JSON object, or is an error.
    """
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        chunk = _parsed(text)
        if not isinstance(chunk, dict) or chunk.get("error"):
            begins = text[:300].decode(errors="replace")
            raise ValueError(f"the engine's stream says {begins}")
        yield chunk
    if "event-stream" not in reply.content_type:
        raise ValueError(f"the engine answered 200 with {reply.content_type}, not an event stream")
    raise BrokenOffError("the engine's stream broke off")


def check_status(reply: aiohttp.ClientResponse, content: bytes) -> None:
    """Hand the engine's own error on.

    Raises:
        CallError: there is one.
    """
    message = said_of_error(reply.status, content)
    if message:
        raise CallError(reply.status, message, hop=ENGINE)


def said_of_error(status: int, content: bytes) -> str:
    """The engine's message in an error's body; empty when it is not an error."""
    if status == 200:
        return ""
    try:
        said = _parsed(content)["error"]["message"]
    except (KeyError, TypeError):
        said = None
    return str(said) if said else f"the engine: {content.decode(errors='replace')[:500]}"


def _parsed(text: bytes) -> Any:
    """The parsed JSON; None where it is invalid, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
