"""Note one call of an episode while the proxy handles it: its log, and its outcome on the wire."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.agents.call_log import MOST_REPLIES, CallLog
from shakedown.agents.wire import WireCall
from shakedown.rollout.agent_calls import Body, Call
from shakedown.rollout.protocols.base import pieces

_MALFORMED = (ValueError, TypeError, AttributeError, KeyError)  # what an engine may tell

# Prefixes that the protocols put before the engine's id of a reply.
_PREFIXES = {"responses": "resp_", "messages": "msg_"}


@dataclass
class _LoggedReply:
    texts: dict[str, list[str]] = field(default_factory=dict)  # by kind
    tools: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str = ""


class CallEntry:
    """One call; `key`: of its episode, as the agent gave it.

    Args:
        log: of the episode; None: there is none, or nobody reads it.
        protocol: the path below `/v1`.
        wire: of the episode, with its other calls; None: the call belongs to none.
    """

    def __init__(
        self, key: str, log: CallLog | None, protocol: str, wire: list[WireCall] | None = None
    ) -> None:
        self.key, self._log = key, log
        self._call = log.begin(protocol) if log is not None else None
        self._began = time.monotonic()
        self._wire, self._prefix = WireCall(), _PREFIXES.get(protocol, "")
        if wire is not None:
            wire.append(self._wire)
        self._reply_id = ""
        self._replies: dict[int, _LoggedReply] = {}

    def sent(self, body: Mapping[str, Any]) -> None:
        """Note the request, as a chat completion."""
        if self._log is not None and self._call is not None:
            self._log.add_messages(self._call, body.get("messages"))

    def add(self, chunk: Body) -> None:
        """Note a chunk of the engine's reply; the log says where its form is odd."""
        self._reply_id = str(chunk.get("id") or self._reply_id)[:200]
        if self._call is None:
            return
        try:
            self._add(chunk)
        except _MALFORMED as error:
            self._call.error = f"the engine's reply cannot be shown: {error}"[:400]

    def named(self, reply_id: str) -> None:
        """Note the reply's id as the agent sees it, in any protocol; empty: none yet."""
        self._prefix, self._reply_id = "", reply_id or self._reply_id

    def recorded(self, calls: Sequence[Call]) -> None:
        """Note the calls of the reply that are kept to be trained on."""
        if self._log is not None and self._call is not None:
            self._call.prompt_tokens = len(calls[0].prompt)
            self._call.completion_tokens = sum(len(call.completion.tokens) for call in calls)
            self._log.tokens += self._call.completion_tokens

    def lost(self, error: BaseException) -> None:
        """Note a try that the engine did not answer; it is asked again."""
        self._wire.resend(f"{type(error).__name__} {error}".strip())

    def heard(self) -> None:
        """Note that the engine has begun to answer."""
        self._wire.heard = time.time()

    def ended(self, status: int, error: str = "", fault: str = "", hop: str = "") -> None:
        """Note how the call ended for the agent; `fault`: a key of `causes.CAUSES`."""
        seen = status if fault in ("", "api_status", "unknown_model") else 0
        said = f"status {status}: {error}" if fault == "api_status" else error
        self._wire.end(seen, fault, said, f"{self._prefix}{self._reply_id}", hop)
        if self._log is None or self._call is None:
            return
        self._call.status, self._call.error = status, self._log.cut(error, 2000) or self._call.error
        self._fill()

    def left(self) -> None:
        """Note the end of the call; where the agent got no error, the part that came is kept."""
        self._wire.leave()
        if self._call is not None and not self._call.status:
            self._fill()

    def _fill(self) -> None:
        if self._call is not None:
            replies = [reply for _, reply in sorted(self._replies.items())[:MOST_REPLIES]]
            self._call.replies = [self._shown(reply) for reply in replies]
            self._call.hop, self._call.resent = self._wire.hop, self._wire.resent
            self._call.outcome = self._wire.outcome
            self._call.seconds = round(time.monotonic() - self._began, 6)

    def _add(self, chunk: Body) -> None:
        if self._call is None:
            return
        self._call.request_id = str(chunk.get("id") or self._call.request_id)[:200]
        for choice in chunk.get("choices") or ():
            reply = self._replies.setdefault(int(choice["index"]), _LoggedReply())
            for kind, number, details in pieces(choice.get("delta") or choice.get("message") or {}):
                if kind != "tool":
                    reply.texts.setdefault(kind, []).append(details["text"])
                    continue
                tool = reply.tools.setdefault(number, {"name": "", "arguments": ""})
                tool["name"] += details["name"]
                tool["arguments"] += details["text"]
            reply.finish = str(choice.get("finish_reason") or reply.finish)[:40]

    def _shown(self, reply: _LoggedReply) -> dict[str, Any]:
        if self._log is None:
            return {}
        shown: dict[str, Any] = {"text": self._log.cut("".join(reply.texts.get("text", ())))}
        if "reasoning" in reply.texts:
            shown["reasoning"] = self._log.cut("".join(reply.texts["reasoning"]))
        if reply.tools:
            shown["tool_calls"] = [
                {name: self._log.cut(text) for name, text in tool.items()}
                for _, tool in sorted(reply.tools.items())[:MOST_REPLIES]
            ]
        return shown | {"finish_reason": reply.finish}
