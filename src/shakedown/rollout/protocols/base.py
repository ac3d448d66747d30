"""The interface of a protocol, and helpers to read hostile bodies.

Every protocol is translated into one chat completion and back, as the engine's chat replies have
token ids. A prompt of token ids is one completion instead. Pure.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shakedown.rollout.agent_calls import SAMPLING, Body, RefusedCallError

# Parameters that change nothing that is sampled, shown or kept for a later call.
COMMON = frozenset({"metadata", "service_tier", "user"})
# Chat parameters of vLLM that other protocols' clients give as extra_body.
EXTRAS = frozenset({"chat_template_kwargs", "parallel_tool_calls", "stream", *SAMPLING})


class Reply(ABC):
    """One reply on its way to the agent: takes chat chunks, gives the protocol's events.

    A reply that was not streamed is fed as one chunk, and `whole` is the answer.
    """

    @abstractmethod
    def add(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chat chunk."""

    @abstractmethod
    def end(self) -> Iterator[bytes]:
        """The events after the last chunk."""

    @abstractmethod
    def whole(self, reply: Body) -> Body:
        """The body of the answer to a call that is not streamed, of the engine's."""

    @abstractmethod
    def failed(self, status: int, message: str) -> bytes:
        """The event of an error in the middle of a stream."""

    @staticmethod
    @abstractmethod
    def error(status: int, message: str) -> Body:
        """The body of an error."""


def _same(body: Body) -> Body:
    return body


@dataclass(frozen=True)
class Protocol:
    """`to_chat`: the chat body of a request's; it raises RefusedCallError. `reply`: a new one.

    `path`: what the engine is asked. Where that is not its chat, `to_engine` makes its body of a
    chat's and `from_engine` a chat reply of its own.
    """

    to_chat: Callable[[Body], Body]
    reply: type[Reply]
    path: str = "/v1/chat/completions"
    to_engine: Callable[[Body], Body] = _same
    from_engine: Callable[[Body], Body] = _same


def openai_error(status: int, message: str) -> Body:
    """An error as OpenAI's protocols have it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def event(body: Body) -> bytes:
    """A server-sent event named by the body's type."""
    return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()


def as_chunk(reply: Body) -> Body:
    """A reply that was not streamed as the one chunk of a stream."""
    choices = [{**choice, "delta": choice.get("message")} for choice in reply.get("choices", [])]
    return {**reply, "choices": choices}


def check_names(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse what would be dropped.

    Raises:
        RefusedCallError: it has a parameter beside `known`, and not null.
    """
    for name, value in body.items():
        if name not in known and value is not None:
            raise RefusedCallError(
                f"{name:.80} is not supported in training: it has no translation into the one "
                "chat completion that is recorded",
                hint="leave it out",
            )


def copied(body: Mapping[str, Any], names: Mapping[str, str]) -> Body:
    """The parameters that only have another name in chat, and EXTRAS as they are."""
    renamed = {chat: body[name] for name, chat in names.items() if body.get(name) is not None}
    same = {name: body[name] for name in EXTRAS if body.get(name) is not None}
    # Both have a usage at the end of every stream; chat only where it is asked for.
    return (
        same | renamed | ({"stream_options": {"include_usage": True}} if same.get("stream") else {})
    )


def an_object(value: Any, where: str) -> Body:
    """A JSON object.

    Raises:
        RefusedCallError: it is another value.
    """
    if not isinstance(value, dict):
        raise RefusedCallError(f"{where} is {value!r:.60}: expected a JSON object")
    return value


def a_list(value: Any, where: str) -> list[Any]:
    """A JSON array; null is an empty one.

    Raises:
        RefusedCallError: it is another value.
    """
    if not isinstance(value, list | None):
        raise RefusedCallError(f"{where} is {value!r:.60}: expected a JSON array")
    return value or []


def a_text(value: Any, where: str) -> str:
    """A string.

    Raises:
        RefusedCallError: it is another value.
    """
    if not isinstance(value, str):
        raise RefusedCallError(f"{where} is {value!r:.60}: expected a string")
    return value


def one_of(value: Any, allowed: tuple[Any, ...], where: str) -> None:
    """Refuse other values.

    Raises:
        RefusedCallError: it is another value.
    """
    if value not in allowed:
        choices = ", ".join(str(each) for each in allowed if each is not None)
        raise RefusedCallError(f"{where} is {value!r:.60}: training can use {choices} alone")


def texts(content: Any, kinds: tuple[str, ...], where: str) -> Any:
    """Content in chat's form: a string, or several text parts.

    Args:
        kinds: the types of blocks that hold text.

    Raises:
        RefusedCallError: it is neither, or something in it is not text, such as an image.
    """
    if isinstance(content, str):
        return content
    parts = []
    for block in a_list(content, where):
        one_of(an_object(block, where).get("type"), kinds, f"the type of a block of {where}")
        name = "refusal" if block["type"] == "refusal" else "text"
        parts.append(a_text(block.get(name), f"{where}: {name}"))
    return joined_texts(parts)


def joined_texts(parts: list[str]) -> Any:
    """One text as it is; several as parts, for the engine's template to join."""
    if len(parts) < 2:
        return "".join(parts)
    return [{"type": "text", "text": part} for part in parts]


def tool(name: Any, description: Any, parameters: Any) -> Body:
    """A function in chat's form."""
    function: Body = {"name": a_text(name, "tools: name")}
    if description is not None:
        function["description"] = a_text(description, "tools: description")
    if parameters is not None:
        function["parameters"] = an_object(parameters, "tools: the schema of parameters")
    return {"type": "function", "function": function}


def tool_call(call_id: Any, name: Any, arguments: str) -> Body:
    """An earlier call of a function in chat's form."""
    function = {"name": a_text(name, "a tool call's name"), "arguments": arguments}
    return {"type": "function", "id": a_text(call_id, "a tool call's id"), "function": function}


def pieces(delta: Mapping[str, Any]) -> Iterator[tuple[str, int, Body]]:
    """The parts of a chat delta, as (kind, number, details): reasoning, then text, then tools.

    Number: which tool call; 0 for text. Details: `text` of any kind, `id` and `name` of a tool.
    """
    if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
        yield "reasoning", 0, {"text": reasoning}
    if text := delta.get("content"):
        yield "text", 0, {"text": text}
    for place, call in enumerate(delta.get("tool_calls") or ()):
        function = call.get("function") or {}
        details = {"text": function.get("arguments") or "", "name": function.get("name") or ""}
        yield "tool", call.get("index", place), {**details, "id": call.get("id") or ""}
