"""The view of episodes.jsonl for a page, whatever its lines contain. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.report import text

LONGEST_TEXT = 6000  # characters of one text on the page; the file has more
MOST_CALLS, MOST_MESSAGES = 60, 40  # messages shown of an episode and of a call


@dataclass(frozen=True)
class MessageView:
    """One message or reply; `note`: a remark beside its text, such as why it ended."""

    role: str
    text: str = ""
    note: str = ""
    tools: Sequence[tuple[str, str]] = ()  # name, arguments


@dataclass(frozen=True)
class CallView:
    """One call; `facts` are numbers as text, `error` is empty for a good one."""

    protocol: str
    status: int
    error: str
    facts: Sequence[str]
    messages: Sequence[MessageView]
    replies: Sequence[MessageView]

    @property
    def ok(self) -> bool:
        return not self.error and 200 <= self.status < 400


@dataclass(frozen=True)
class EpisodeView:
    """One episode; `line` is its line in the file, from 1, `index` its number in its check."""

    line: int
    index: int
    check: str
    row: str
    member: str
    cause: str = ""
    detail: str = ""
    trace: str = ""
    reward: str = ""
    seconds: float = 0.0
    calls: Sequence[CallView] = field(default_factory=list)
    calls_left: int = 0

    @property
    def size(self) -> int:
        """The approximate number of characters of its texts."""
        shown = [m for call in self.calls for m in (*call.messages, *call.replies)]
        tools = sum(len(arguments) for message in shown for _, arguments in message.tools)
        return len(self.trace) + len(self.detail) + tools + sum(len(m.text) + 200 for m in shown)


def episode_view(line: Mapping[str, Any], number: int) -> EpisodeView:
    """One line of the file; `number`: from 1."""
    calls = _objects(line.get("calls"))
    left = _whole(line.get("calls_left_out")) or 0
    return EpisodeView(
        line=number,
        index=_whole(line.get("index")) or 0,
        check=_short(line.get("check")),
        row=_short(line.get("row")),
        member=_short(line.get("member")),
        cause=_short(line.get("cause")),
        detail=_long(line.get("detail")),
        trace=_long(line.get("trace")),
        reward=_reward(line.get("reward")),
        seconds=_number(line.get("seconds")),
        calls=[_call(call) for call in calls[:MOST_CALLS]],
        calls_left=len(calls[MOST_CALLS:]) + left,
    )


def _call(call: Mapping[str, Any]) -> CallView:
    messages, repeats = _list(call.get("messages")), _whole(call.get("repeats"))
    left = len(messages[MOST_MESSAGES:]) + (_whole(call.get("messages_left_out")) or 0)
    shown = [_message(message) for message in messages[:MOST_MESSAGES]]
    if repeats:
        told = f"the first {text.plural(repeats, 'message')} as in the call before"
        shown.insert(0, MessageView("", note=told))
    if left:
        shown.append(MessageView("", note=f"{text.plural(left, 'more message')} in the file"))
    return CallView(
        protocol=_short(call.get("protocol")),
        status=_whole(call.get("status")) or 0,
        error=_long(call.get("error")),
        facts=_facts(call),
        messages=shown,
        replies=[_reply(reply) for reply in _objects(call.get("replies"))],
    )


def _facts(call: Mapping[str, Any]) -> list[str]:
    seconds, asked = _number(call.get("seconds")), _whole(call.get("prompt_tokens"))
    answered = _whole(call.get("completion_tokens"))
    facts = [f"{asked:,} + {answered:,} tokens"] if asked and answered is not None else []
    facts += [text.duration(seconds)] if seconds else []
    request = _short(call.get("request_id"))
    return [*facts, *([f"request {request}"] if request else [])]


def _message(message: Any) -> MessageView:
    if not isinstance(message, Mapping):
        return MessageView("", _long(message))
    others = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content", "tool_calls") and value is not None
    }
    return MessageView(
        role=_short(message.get("role")),
        text=_content(message.get("content")),
        note=", ".join(f"{_short(name)}: {_short(value)}" for name, value in others.items()),
        tools=[_tool(each.get("function") or each) for each in _objects(message.get("tool_calls"))],
    )


def _reply(reply: Mapping[str, Any]) -> MessageView:
    reasoning = _long(reply.get("reasoning"))
    said = _long(reply.get("text"))
    return MessageView(
        role="reply",
        text=f"[reasoning]\n{reasoning}\n[reply]\n{said}" if reasoning else said,
        note=_short(reply.get("finish_reason")),
        tools=[_tool(each) for each in _objects(reply.get("tool_calls"))],
    )


def _tool(function: Any) -> tuple[str, str]:
    if not isinstance(function, Mapping):
        return "", _long(function)
    return _short(function.get("name")), _long(function.get("arguments"))


def _content(content: Any) -> str:
    """The text itself, or the joined texts of text-only parts."""
    parts = _objects(content)
    if parts and len(parts) == len(content) and all("text" in part for part in parts):
        return _long("\n".join(str(part["text"]) for part in parts))
    return _long(content)


def _reward(reward: Any) -> str:
    if isinstance(reward, Mapping):
        return text.shorten(", ".join(f"{key}: {_short(value)}" for key, value in reward.items()))
    return _short(reward)


def _long(value: Any) -> str:
    """Its beginning and end."""
    told = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    if len(told) <= LONGEST_TEXT:
        return told
    head, tail = LONGEST_TEXT - LONGEST_TEXT // 4, LONGEST_TEXT // 4
    missing = f"[{len(told) - LONGEST_TEXT:,} more characters in the file]"
    return f"{told[:head]} {missing} {told[-tail:]}"


def _short(value: Any) -> str:
    return text.shorten(value, 120)


def _number(value: Any) -> float:
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if whole and 0 <= value < 1e9 else 0.0


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in _list(value) if isinstance(each, Mapping)]
