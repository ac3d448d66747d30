"""Rows to train and evaluate on: each a conversation, most with the answer to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.read import placed_rows

_FORM = '{"messages": [{"role": "user", "content": "..."}], "answer": "..."}'
# Keys of a message, and of a call in it, that only say who speaks or what belongs together.
REFERENCES = frozenset({"role", "tool_call_id", "id", "type", "index"})


@dataclass(frozen=True)
class Conversation:
    """`messages`, each with `role` and `content`; at least one of them is the assistant's.

    A message has whatever else its row gives it, such as `tool_calls`. `columns`: the whole row;
    `place`: where it stands.
    """

    messages: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, kw_only=True)
    place: str = field(default="", compare=False, kw_only=True)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """What the assistant may call, as a chat template takes it.

        Raises:
            UsageError: the column is of another form.
        """
        tools = self.columns.get("tools") or ()
        if tools and not _are_objects(tools):
            raise UsageError(f"{self.place}: `tools` must be a list of objects, got {tools!r:.80}")
        return tools


@dataclass(frozen=True)
class AnsweredRow(Conversation):
    """A conversation up to the question, and its answer."""

    answer: str


def load_rows(source: str, *, limit: int | None = None) -> list[AnsweredRow]:
    """Read a data set.

    Args:
        source: as `shakedown.data_sources` names it: a file, `hub:NAME[:SPLIT]`, a known data set.
        limit: read at most this many rows.

    Raises:
        UsageError: it cannot be read, has no rows, or a row lacks `messages` or `answer`;
            names the file and the line.
        CannotJudgeError: the hub's data set cannot be had.
    """
    return list(iter_rows(source, limit=limit))


def iter_rows(source: str, *, limit: int | None = None) -> Iterator[AnsweredRow]:
    """The rows of `load_rows`, one at a time as they are read."""
    for place, body in placed_rows(source, limit=limit, lines=_dataset_lines):
        yield row_of(body, place)


def iter_conversations(source: str, *, limit: int | None = None) -> Iterator[Conversation]:
    """Rows with an answer, and conversations without: what SFT trains on.

    Raises:
        UsageError, CannotJudgeError: as `load_rows`, but for a row without `answer`.
    """
    for place, body in placed_rows(source, limit=limit, lines=_dataset_lines):
        yield conversation_of(body, place)


def _dataset_lines(path: Path) -> Iterator[str]:
    """Streamed line by line: `datasets` takes dates for numbers where it reads JSON itself.

    Nothing is copied into a cache folder that ranks would race for.
    """
    import datasets

    with path.open("rb"):  # the plain words of the system for a file that cannot be read
        table = datasets.load_dataset(
            "text",
            data_files={"train": str(path)},
            split="train",
            streaming=True,
            encoding="utf-8-sig",
        )
    for row in table:
        yield row["text"]


def row_of(body: Mapping[str, Any], place: str) -> AnsweredRow:
    """The row that an object of `placed_rows` is.

    Raises:
        UsageError: it lacks `messages` or `answer`, or they are of another form; names the place.
    """
    row = conversation_of(body, place)
    if not isinstance(row, AnsweredRow):
        raise UsageError(
            f"{place}: no `answer`; keys: {', '.join(body)}",
            hint=f"expected {_FORM}; without `answer` SFT alone can use a row",
        )
    return row


def conversation_of(body: Mapping[str, Any], place: str) -> Conversation:
    """The row, or without `answer` the conversation, that an object of `placed_rows` is.

    Raises:
        UsageError: as `row_of`; without `answer`, no message is the assistant's.
    """
    fault = _fault(body)
    if fault:
        raise UsageError(f"{place}: {fault}", hint=f"expected {_FORM}")
    messages = tuple(map(_message, body["messages"]))
    answer = body.get("answer")
    if answer is None:
        return Conversation(messages, columns=body, place=place)
    return AnsweredRow(messages, answer, columns=body, place=place)


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that say nothing (parquet gives all messages the keys of each); no content, as
    beside tool calls, is the empty text that servers write for it.
    """
    kept = {key: value for key, value in given.items() if value is not None}
    return {"role": given["role"], "content": "", **kept}


def _fault(body: Mapping[str, Any]) -> str:
    """What is wrong with a row, or an empty string."""
    messages, answer = body.get("messages"), body.get("answer")
    if messages is None:
        return f"no `messages`; keys: {', '.join(body) or 'none'}"
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list with at least one message"
    for message in messages:
        if not _is_message(message):
            return f"each message needs text `role` and `content`, got {message!r:.80}"
    if answer is None and all(message["role"] != "assistant" for message in messages):
        return f"no `answer`, and no message of the assistant; keys: {', '.join(body)}"
    if not isinstance(answer, str | None):
        return f"`answer` must be text, got {type(answer).__name__}"
    return ""


def _is_message(message: object) -> bool:
    """Whether it has a role and a text; beside other things, such as tool calls, none is needed."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls")
    if calls is not None and not _are_objects(calls):
        return False
    content = message.get("content")
    other = any(message[key] for key in message if key not in {*REFERENCES, "name"})
    return isinstance(content, str) or (content is None and other)


def _are_objects(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(each, Mapping) for each in given)
