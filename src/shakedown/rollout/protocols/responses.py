"""OpenAI's responses."""

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
    one_of,
    openai_error,
    pieces,
    texts,
    tool,
    tool_call,
)

_RENAMED = {"model": "model", "max_output_tokens": "max_tokens", "stop": "stop"}
_TRANSLATED = {"input", "instructions", "tools", "tool_choice", "reasoning", "text", "include"}
# `store`: a later call that names what was stored is refused.
_WITHOUT_EFFECT = {"store", "stream_options", "safety_identifier", "max_tool_calls"}
_WITHOUT_EFFECT |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
_WITHOUT_EFFECT |= {"truncation", "background"}
_KNOWN = frozenset({*_RENAMED, *_TRANSLATED, *_WITHOUT_EFFECT, *COMMON, *EXTRAS})
_TEXTS = ("input_text", "output_text", "text", "refusal")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def to_chat(body: Body) -> Body:
    """The chat body of a request.

    Raises:
        RefusedCallError: it cannot be translated, or is malformed.
    """
    _check(body)
    sent = copied(body, _RENAMED)
    messages: list[Body] = []
    if body.get("instructions") is not None:
        text = a_text(body["instructions"], "instructions")
        messages.append({"role": "system", "content": text})
    if isinstance(body.get("input"), str):
        messages.append({"role": "user", "content": body["input"]})
    else:
        for item in a_list(body.get("input"), "input"):
            _add(messages, an_object(item, "an item of input"))
    sent["messages"] = messages
    if tools := a_list(body.get("tools"), "tools"):
        sent["tools"] = [_tool(an_object(each, "a tool")) for each in tools]
    if body.get("tool_choice") is not None:
        sent["tool_choice"] = body["tool_choice"]
    reasoning = an_object(body.get("reasoning") or {}, "reasoning")
    check_names(reasoning, frozenset({"effort", "summary", "generate_summary"}))
    if reasoning.get("effort"):
        sent["reasoning_effort"] = reasoning["effort"]
    return sent


def _check(body: Body) -> None:
    if body.get("previous_response_id"):
        raise RefusedCallError(
            "previous_response_id is not supported in training: no state is stored",
            hint="send the whole conversation as input",
        )
    check_names(body, _KNOWN)
    one_of(body.get("truncation"), (None, "disabled"), "truncation")
    one_of(body.get("background"), (None, False), "background")
    text = an_object(body.get("text") or {}, "text")
    check_names(text, frozenset({"format", "verbosity"}))  # the latter without effect
    form = an_object(text.get("format") or {}, "text.format")
    if form.get("type", "text") != "text":
        raise RefusedCallError(
            "text.format forces tokens upon the model",
            hint="leave it out, and judge the form of the answer in the reward",
        )
    for name in a_list(body.get("include"), "include"):
        one_of(name, ("reasoning.encrypted_content",), "include")


def _add(messages: list[Body], item: Body) -> None:
    """Add an item: a message, a call and thoughts of one turn are one message in chat."""
    kind = item.get("type", "message")
    kinds = ("message", "function_call", "function_call_output", "reasoning")
    one_of(kind, kinds, "the type of an item of input")
    if kind == "message":
        _add_message(messages, item)
    elif kind == "function_call":
        arguments = a_text(item.get("arguments"), "arguments")
        call = tool_call(item.get("call_id"), item.get("name"), arguments)
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        _add_reasoning(messages, item)
    else:
        output = texts(item.get("output"), _TEXTS, "the output of a function")
        call_id = a_text(item.get("call_id"), "call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


def _add_message(messages: list[Body], item: Body) -> None:
    one_of(item.get("role"), tuple(_ROLES), "the role of a message")
    content = texts(item.get("content"), _TEXTS, "the content of a message")
    role = _ROLES[item["role"]]
    last = messages[-1] if messages else {}
    if role == last.get("role") == "assistant" and not last["content"] and "reasoning" in last:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_reasoning(messages: list[Body], item: Body) -> None:
    parts = a_list(item.get("content"), "reasoning: content")
    thought = "".join(
        a_text(an_object(part, "reasoning: content").get("text"), "reasoning: text")
        for part in parts
    )
    if item.get("encrypted_content") and not thought:
        raise RefusedCallError("encrypted reasoning cannot be read: its text is needed")
    if thought:
        messages.append({"role": "assistant", "content": "", "reasoning": thought})


def _turn(messages: list[Body]) -> Body:
    """The assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _tool(given: Body) -> Body:
    one_of(given.get("type"), ("function",), "the type of a tool")
    made = tool(given.get("name"), given.get("description"), given.get("parameters"))
    if given.get("strict") is not None:
        made["function"]["strict"] = given["strict"]
    return made


class ResponsesReply(Reply):
    """Output items one after the other, by their own events."""

    error = staticmethod(openai_error)

    def __init__(self) -> None:
        self._response: Body = {}
        self._items: list[Body] = []
        self._open = ("", 0)
        self._number = -1
        self._finish = ""

    def add(self, chunk: Body) -> Iterator[bytes]:
        """The events of one chat chunk."""
        if not self._response:
            self._response = _response(chunk)
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        for choice in (chunk.get("choices") or [])[:1]:
            for kind, number, details in pieces(choice.get("delta") or {}):
                yield from self._piece(kind, number, details)
            self._finish = choice.get("finish_reason") or self._finish
        if chunk.get("usage"):
            self._response["usage"] = _usage(chunk["usage"])

    def end(self) -> Iterator[bytes]:
        """The rest: the last item's end, and the whole response.

        Always `completed`: frameworks raise on `incomplete`, and replies that the stage's own
        limit cuts off are ordinary in training. `incomplete_details` tells of it all the same.
        """
        cut = self._finish == "length"
        yield from self._close("incomplete" if cut else "completed")
        details = {"reason": "max_output_tokens"} if cut else None
        more = {"status": "completed", "incomplete_details": details, "output": self._items}
        self._response = {**self._response, **more}
        yield self._event("response.completed", response=self._response)

    def whole(self, reply: Body) -> Body:
        """A response."""
        for _ in (*self.add(as_chunk(reply)), *self.end()):
            pass
        return self._response

    def failed(self, status: int, message: str) -> bytes:
        """The documented event; clients raise by its `error`."""
        told = {"code": str(status), "message": message, "param": None}
        return self._event("error", **told, **openai_error(status, message))

    def _piece(self, kind: str, number: int, details: Body) -> Iterator[bytes]:
        if (kind, number) != self._open:
            yield from self._close("completed")
            self._open = (kind, number)
            self._items.append(_item(kind, details, f"{self._response['id']}_{len(self._items)}"))
            item = self._items[-1]
            begun = {**item, "content": []} if "content" in item else {**item}
            yield self._item_event("response.output_item.added", item=begun)
            if kind != "tool":
                yield self._part_event("response.content_part.added", part={**item["content"][0]})
        text, item = details["text"], self._items[-1]
        if not text:
            return
        if kind == "tool":
            item["arguments"] += text
            yield self._place_event("response.function_call_arguments.delta", delta=text)
        else:
            item["content"][0]["text"] += text
            yield self._text_event(kind, "delta", delta=text)

    def _close(self, status: str) -> Iterator[bytes]:
        kind, self._open = self._open[0], ("", 0)
        if not kind:
            return
        item = self._items[-1]
        item["status"] = status
        if kind == "tool":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._place_event("response.function_call_arguments.done", **done)
        else:
            yield self._text_event(kind, "done", text=item["content"][0]["text"])
            yield self._part_event("response.content_part.done", part=item["content"][0])
        yield self._item_event("response.output_item.done", item=item)

    def _text_event(self, kind: str, what: str, **more: Any) -> bytes:
        if kind == "reasoning":
            return self._part_event(f"response.reasoning_text.{what}", **more)
        return self._part_event(f"response.output_text.{what}", logprobs=[], **more)

    def _part_event(self, name: str, /, **more: Any) -> bytes:
        return self._place_event(name, content_index=0, **more)

    def _place_event(self, name: str, /, **more: Any) -> bytes:
        return self._item_event(name, item_id=self._items[-1]["id"], **more)

    def _item_event(self, name: str, /, **more: Any) -> bytes:
        return self._event(name, output_index=len(self._items) - 1, **more)

    def _event(self, name: str, /, **more: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **more})


def _response(chunk: Body) -> Body:
    return {
        "id": f"resp_{chunk.get('id', '')}",
        "object": "response",
        "created_at": chunk.get("created", 0),
        "model": chunk.get("model", ""),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _item(kind: str, details: Body, name: str) -> Body:
    item: Body = {"id": name, "status": "in_progress"}
    if kind == "tool":
        called = {"call_id": details["id"], "name": details["name"], "arguments": ""}
        return {**item, "type": "function_call", **called}
    if kind == "reasoning":
        part: Body = {"type": "reasoning_text", "text": ""}
        return {**item, "type": "reasoning", "summary": [], "content": [part]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {**item, "type": "message", "role": "assistant", "content": [part]}


def _usage(usage: Body) -> Body:
    read, written = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
