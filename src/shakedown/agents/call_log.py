"""Log of an episode's calls and their replies: kept for people to read, within bounds.

The recording proxy sees all of a call (`seen_by: proxy`). The relay before a server whose replies
cannot be recorded reads replies of chat completions, and no tokens (`seen_by: relay`).
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MOST_CALLS = 200  # of an episode
MOST_MESSAGES = 100  # of a call
MOST_REPLIES = 8  # of a call
LONGEST_TEXT = 20_000  # characters of a message or a reply
_MOST_NESTED = 200  # objects and arrays of a message that is kept as it is
ROOM = 200_000  # characters of an episode; when they are used up, of each text its size is told

SeenBy = Literal["proxy", "relay"]
_UNANSWERED = "no whole reply before the agent left the call or the episode ended"


@dataclass
class LoggedCall:
    """One request of an agent and its reply; texts are cut to what there is room for.

    `protocol`: the path below `/v1`. `messages`: in the form of chat completions (of a client: as
    sent), without the first `repeats` ones, the same as in the call before; `messages_left_out`
    counts others that are not kept. `replies`: one per choice: `text`, `finish_reason` and, if
    there are any, `reasoning` and `tool_calls`. `status`: as the agent saw it, 0 without an answer.
    `seconds`: to the reply's end; of a client, to its headers. `hop`: where it failed or had to be
    sent again; `outcome`: of a call that the proxy saw; `resent`: how often it was sent again.
    """

    protocol: str
    messages: list[Any] = field(default_factory=list)
    repeats: int = 0
    messages_left_out: int = 0
    replies: list[dict[str, Any]] = field(default_factory=list)
    request_id: str = ""
    status: int = 0
    error: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    hop: str = ""
    outcome: str = ""
    resent: int = 0


@dataclass
class CallLog:
    """The calls of one episode in the order in which they began; `left_out` counts those beyond.

    `tokens`: sampled in all of them, where they are told.
    """

    seen_by: SeenBy
    calls: list[LoggedCall] = field(default_factory=list)
    left_out: int = 0
    tokens: int = 0
    room: int = ROOM
    _before: list[int] = field(default_factory=list)

    def begin(self, protocol: str) -> LoggedCall:
        """A call, kept where there is room for it."""
        call = LoggedCall(self.cut(protocol, 200))
        if len(self.calls) < MOST_CALLS:
            self.calls.append(call)
        else:
            self.left_out += 1
        return call

    def add_messages(self, call: LoggedCall, messages: Any) -> None:
        """Add the request's messages; anything but an array is one message, null adds nothing."""
        found = messages if isinstance(messages, list) else [] if messages is None else [messages]
        texts = [json.dumps(each, ensure_ascii=False) for each in found]
        marks = [hash(text) for text in texts]
        same = [old == new for old, new in zip(self._before, marks, strict=False)]
        call.repeats = same.index(False) if False in same else len(same)
        self._before = marks
        new = list(zip(found, texts, strict=True))[call.repeats :]
        call.messages = [self._message(*each) for each in new[:MOST_MESSAGES]]
        call.messages_left_out = len(new) - len(call.messages)

    def cut(self, text: str, most: int = LONGEST_TEXT) -> str:
        """The text, or its beginning and end with how much is missing between; takes up room."""
        most = min(most, self.room)
        self.room -= min(len(text), most)
        if len(text) <= most:
            return text
        head, tail = most - most // 4, most // 4
        missing = f"[{len(text) - most:,} characters cut]"
        return f"{text[:head]} {missing} {text[len(text) - tail :]}".strip()

    def to_json(self) -> dict[str, Any]:
        """The log in its file form."""
        calls = [asdict(call) for call in self.calls]
        for call in calls:
            if not call["status"] and not call["error"]:
                call["error"] = _UNANSWERED
        return {"seen_by": self.seen_by, "calls": calls, "left_out": self.left_out}

    def _message(self, message: Any, text: str) -> Any:
        if len(text) <= min(LONGEST_TEXT, self.room) and _is_flat(text):
            self.room -= len(text)
            return message
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return {"content": self.cut(text)}
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        shown = {
            "role": self.cut(str(message.get("role", "")), 40),
            "content": self.cut(message["content"]),
        }
        return shown | ({"more": self.cut(json.dumps(others))} if others else {})


def _is_flat(text: str) -> bool:
    """Whether a reader of the file can parse it: deeper nesting is kept as text."""
    return text.count("[") + text.count("{") <= _MOST_NESTED
