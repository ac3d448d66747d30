"""Anthropic's messages."""

import json
from collections.abc import Iterator
from typing import Any

from shakedown.rollout.agent_calls import Body, RefusedCallError
from shakedown.rollout.protocols.base import (
    COMMON,
    EXTRAS,
    Reply,
    a_list,
    a_text,
    an_object,
    as_chunk,
    check_names,
    copied,
    event,
    joined_texts,
    one_of,
    pieces,
    texts,
    tool,
    tool_call,
)

_RENAMED = {"model": "model", "max_tokens": "max_tokens", "stop_sequences": "stop"}
_TRANSLATED = {"messages", "system", "tools", "tool_choice", "thinking", "output_config"}
_TRANSLATED |= {"context_management"}
_WITHOUT_EFFECT = {"cache_control", "inference_geo", "diagnostics"}
_KNOWN = frozenset({*_RENAMED, *_TRANSLATED, *_WITHOUT_EFFECT, *COMMON, *EXTRAS})
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_UNREAD = "_not_json"  # arguments that the model wrote wrongly, in an input that must be an object


def to_chat(body: Body) -> Body:
    """The chat body of a request.

    Raises:
        RefusedCallError: it cannot be translated, or is malformed.
    """
    check_names(body, _KNOWN)
    sent = copied(body, _RENAMED)
    system = texts(body.get("system") or "", ("text",), "system")
    sent["messages"] = [{"role": "system", "content": system}] if system else []
    for message in a_list(body.get("messages"), "messages"):
        sent["messages"] += _message(an_object(message, "a message"))
    if sent["messages"] and sent["messages"][-1]["role"] == "assistant":
        # The protocol's own meaning of a last message of the assistant: the reply goes on with it.
        sent |= {"add_generation_prompt": False, "continue_final_message": True}
    if tools := a_list(body.get("tools"), "tools"):
        sent["tools"] = [_tool(an_object(each, "a tool")) for each in tools]
    _check_context(body)
    return sent | _tool_choice(body) | _thinking(body)


def _check_context(body: Body) -> None:
    """Refuse edits that shorten the history; Claude Code's "keep all thinking" is harmless."""
    context = an_object(body.get("context_management") or {}, "context_management")
    for edit in a_list(context.get("edits"), "context_management: edits"):
        if an_object(edit, "an edit of context_management").get("keep") != "all":
            raise RefusedCallError(
                "context_management takes from the history: the proxy keeps none",
                hint="leave it out, and send the messages that the model is to read",
            )


def _message(message: Body) -> Iterator[Body]:
    role, content = message.get("role"), message.get("content")
    one_of(role, ("user", "assistant", "system"), "the role of a message")
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield _assistant(a_list(content, "content"))
    else:
        yield from _user(str(role), a_list(content, "content"))


def _user(role: str, blocks: list[Any]) -> Iterator[Body]:
    """Messages of a user: results of tools are separate messages in chat."""
    said: list[str] = []
    for block in blocks:
        kind = an_object(block, "a block of content").get("type")
        one_of(kind, ("text", "tool_result"), f"the type of a block of a {role} message")
        if kind == "text":
            said.append(a_text(block.get("text"), "text"))
            continue
        if said:
            yield {"role": role, "content": joined_texts(said)}
            said = []
        yield _result(block)
    if said:
        yield {"role": role, "content": joined_texts(said)}


def _result(block: Body) -> Body:
    content = texts(block.get("content") or "", ("text",), "the content of a tool_result")
    if block.get("is_error"):  # chat has no other place for it
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        content = "Error: " + "\n".join(part["text"] for part in parts)
    return {
        "role": "tool",
        "tool_call_id": a_text(block.get("tool_use_id"), "tool_use_id"),
        "content": content,
    }


def _assistant(blocks: list[Any]) -> Body:
    said: list[str] = []
    thought: list[str] = []
    calls: list[Body] = []
    for block in blocks:
        kind = an_object(block, "a block of content").get("type")
        one_of(kind, ("text", "thinking", "tool_use"), "the type of a block of an assistant")
        if kind == "text":
            said.append(a_text(block.get("text"), "text"))
        elif kind == "thinking":
            thought.append(a_text(block.get("thinking"), "thinking"))
        else:
            calls.append(tool_call(block.get("id"), block.get("name"), _arguments(block)))
    message: Body = {"role": "assistant", "content": joined_texts(said)}
    if thought:
        message["reasoning"] = "".join(thought)
    return message | ({"tool_calls": calls} if calls else {})


def _arguments(block: Body) -> str:
    values = an_object(block.get("input"), "input of a tool_use")
    if list(values) == [_UNREAD]:
        return str(values[_UNREAD])
    return json.dumps(values, ensure_ascii=False)


def _tool(given: Body) -> Body:
    one_of(given.get("type"), (None, "custom"), "the type of a tool")
    return tool(given.get("name"), given.get("description"), given.get("input_schema"))


def _tool_choice(body: Body) -> Body:
    if body.get("tool_choice") is None:
        return {}
    choice = an_object(body["tool_choice"], "tool_choice")
    one_of(choice.get("type"), tuple(_CHOICES), "tool_choice")
    sent: Body = {"tool_choice": _CHOICES[choice["type"]]}
    if choice.get("disable_parallel_tool_use"):
        sent["parallel_tool_calls"] = False
    return sent


def _thinking(body: Body) -> Body:
    sent: Body = {}
    thinking = an_object(body.get("thinking") or {}, "thinking")
    one_of(thinking.get("type"), (None, "enabled", "adaptive", "disabled"), "the type of thinking")
    if thinking.get("budget_tokens") is not None:
        sent["thinking_token_budget"] = thinking["budget_tokens"]
    config = an_object(body.get("output_config") or {}, "output_config")
    check_names(config, frozenset({"effort", "format"}))
    if config.get("format"):
        raise RefusedCallError("output_config.format forces tokens upon the model")
    if config.get("effort"):
        sent["reasoning_effort"] = config["effort"]
    return sent | ({"reasoning_effort": "none"} if thinking.get("type") == "disabled" else {})


class MessagesReply(Reply):
    """Content blocks one after the other, by their own events."""

    def __init__(self) -> None:
        self._message: Body = {}
        self._blocks: list[Body] = []
        self._open = ("", 0)
        self._input = ""
        self._usage = {"input_tokens": 0, "output_tokens": 0}

    def add(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chat chunk."""
        if not self._message:
            yield self._started(chunk)
        for choice in (chunk.get("choices") or [])[:1]:
            for kind, number, details in pieces(choice.get("delta") or {}):
                yield from self._piece(kind, number, details)
            if reason := choice.get("finish_reason"):
                stop = choice.get("stop_reason")
                stopped = stop if isinstance(stop, str) else None
                self._message["stop_reason"] = (
                    "stop_sequence" if stopped else _REASONS.get(reason, "end_turn")
                )
                self._message["stop_sequence"] = stopped
        if usage := chunk.get("usage"):
            self._usage["input_tokens"] = usage.get("prompt_tokens") or 0
            self._usage["output_tokens"] = usage.get("completion_tokens") or 0

    def end(self) -> Iterator[bytes]:
        """The rest: why it stopped, and the usage."""
        yield from self._close()
        names = ("stop_reason", "stop_sequence")
        delta = {name: self._message.get(name) for name in names}
        yield event({"type": "message_delta", "delta": delta, "usage": self._usage})
        yield event({"type": "message_stop"})

    def whole(self, reply: Body) -> Body:
        """A message."""
        for _ in (*self.add(as_chunk(reply)), *self.end()):
            pass
        return {**self._message, "content": self._blocks, "usage": self._usage}

    def failed(self, status: int, message: str) -> bytes:
        """The protocol's own event."""
        return event(self.error(status, message))

    @staticmethod
    def error(status: int, message: str) -> Body:
        """The body of an error."""
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def _started(self, chunk: Body) -> bytes:
        self._message = {
            "id": f"msg_{chunk.get('id', '')}",
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model", ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return event({"type": "message_start", "message": {**self._message, "usage": self._usage}})

    def _piece(self, kind: str, number: int, details: Body) -> Iterator[bytes]:
        if (kind, number) != self._open:
            yield from self._close()
            self._open = (kind, number)
            self._blocks.append(_block(kind, details))
            yield self._event("content_block_start", content_block={**self._blocks[-1]})
        text, block = details["text"], self._blocks[-1]
        if not text:
            return
        if kind == "tool":
            self._input += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            name = "thinking" if kind == "reasoning" else "text"
            block[name] += text
            delta = {"type": f"{name}_delta", name: text}
        yield self._event("content_block_delta", delta=delta)

    def _close(self) -> Iterator[bytes]:
        kind, self._open = self._open[0], ("", 0)
        if kind == "tool":
            self._blocks[-1]["input"], self._input = _input(self._input), ""
        if kind:
            yield self._event("content_block_stop")

    def _event(self, name: str, /, **more: Any) -> bytes:
        return event({"type": name, "index": len(self._blocks) - 1, **more})


def _block(kind: str, details: Body) -> Body:
    if kind == "tool":
        return {"type": "tool_use", "id": details["id"], "name": details["name"], "input": {}}
    if kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input(arguments: str) -> Body:
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        values = None
    return values if isinstance(values, dict) else {_UNREAD: arguments}
