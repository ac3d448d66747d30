"""Find text sampled for one row in the messages of another row's episode: shared state.

A list on the class, a session of the module or a memory on disk makes an episode depend on others,
so that its reward is not that of its row. Compared are texts, since a history is tokenized anew.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shakedown.rollout.agent_calls import Call

_WHOLE = 20  # characters of a reply that is a whole message of the assistant elsewhere
_PART = 60  # characters at a reply's beginning that stand anywhere in a message
_DISTINCT = 8  # characters: a small model repeats itself, and others do so alike
_LONGEST = 100_000  # characters of a message that are looked at


@dataclass
class _SampledText:
    """A text that was sampled; `asked`: its prompt, which may have contained the text already."""

    name: str
    row: str
    text: str
    asked: str


@dataclass
class _Episode:
    name: str
    row: str
    row_text: str
    looked_at: set[int] = field(default_factory=set)
    asked: str = ""
    fault: str = ""


class SharedHistory:
    """All episodes' messages and replies, from `begin` to `end` of each."""

    def __init__(self) -> None:
        self._episodes: dict[str, _Episode] = {}
        self._replies: dict[str, list[_SampledText]] = {}  # by their first characters
        self._own: dict[str, set[str]] = {}  # texts that were sampled for a row

    def begin(self, key: str, name: str, row: str) -> None:
        """An episode of a row, which is given as JSON; rows of equal text are one."""
        text = "\n".join(_strings(json.loads(row)))
        self._episodes[key] = _Episode(name, row, text)
        self._own.setdefault(row, set())

    def end(self, key: str) -> str:
        """End an episode; the text of others that its messages contained, or empty."""
        episode = self._episodes.pop(key, None)
        return episode.fault if episode is not None else ""

    def asked(self, key: str, messages: Any) -> None:
        """Messages of a call, in the form of chat completions."""
        episode = self._episodes.get(key)
        if episode is None:
            return
        found = list(_texts(messages))
        episode.asked = "\n".join(text for _, text in found)
        for role, text in found:
            mark = hash((role, text))
            if mark not in episode.looked_at and not episode.fault:
                episode.looked_at.add(mark)
                episode.fault = self._fault(episode, role, text)

    def sampled(self, key: str, calls: Sequence[Call]) -> None:
        """The replies to the messages that came last."""
        episode = self._episodes.get(key)
        if episode is None:
            return
        for call in calls:
            text = call.completion.text.strip()
            if len(set(text)) < _DISTINCT or len(text) < _WHOLE or text in self._own[episode.row]:
                continue
            self._own[episode.row].add(text)
            reply = _SampledText(episode.name, episode.row, text, episode.asked)
            for length in {_WHOLE, min(_PART, len(text))}:
                self._replies.setdefault(text[:length], []).append(reply)

    def _fault(self, episode: _Episode, role: str, text: str) -> str:
        for reply in self._candidates(role, text):
            if reply.row != episode.row and not self._innocent(episode, reply):
                return (
                    f"a message of {episode.name} contains text sampled for {reply.name}: "
                    f"{reply.text[:80]!r}"
                )
        return ""

    def _candidates(self, role: str, text: str) -> Iterator[_SampledText]:
        if role == "assistant":
            found = self._replies.get(text.strip()[:_WHOLE], ())
            yield from (reply for reply in found if reply.text == text.strip())
        for place in range(min(len(text), _LONGEST) - _PART + 1):
            yield from self._replies.get(text[place : place + _PART], ())

    def _innocent(self, episode: _Episode, reply: _SampledText) -> bool:
        """Whether the text is in the row, was sampled for it too, or came from a prompt itself."""
        part = reply.text[:_PART]
        return (
            part in reply.asked
            or part in episode.row_text
            or any(part in own for own in self._own[episode.row])
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _texts(messages: Any) -> Iterator[tuple[str, str]]:
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str) and text:
                yield str(message.get("role")), text
