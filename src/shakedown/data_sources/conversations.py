"""Rows to train and evaluate on: conversations, most of them with an answer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.read import placed_rows

_FORM = '{"messages": [{"role": "user", "content": "..."}], "answer": "..."}'
# Keys of a message, and of a call in it, that only identify speakers or link calls and results.
REFERENCES = frozenset({"role", "tool_call_id", "id", "type", "index"})


@dataclass(frozen=True)
class Conversation:
    """`messages`, each with `role` and `content`; at least one of them is the assistant's.

    A message keeps the row's other keys, such as `tool_calls`. `columns`: the whole row; `place`:
    its location.
    """

    messages: tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, kw_only=True)
    place: str = field(default="", compare=False, kw_only=True)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the assistant may call, in a chat template's form.

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
        source: a file, `hub:NAME[:SPLIT]` or a known data set, see `shakedown.data_sources`.
        limit: read at most this many rows.

    Raises:
        UsageError: it cannot be read, has no rows, or a row lacks `messages` or `answer`;
            names the file and the line.
        CannotJudgeError: the hub's data set is not available.
    """
    return list(iter_rows(source, limit=limit))


def iter_rows(source: str, *, limit: int | None = None) -> Iterator[AnsweredRow]:
    """The rows of `load_rows`, one by one as they are read."""
    for place, body in placed_rows(source, limit=limit, lines=_dataset_lines):
        yield row_of(body, place)


def iter_conversations(source: str, *, limit: int | None = None) -> Iterator[Conversation]:
    """Rows with an answer and conversations without one: the training data of SFT.

    Raises:
        UsageError, CannotJudgeError: as `load_rows`, but for a row without `answer`.
    """
    for place, body in placed_rows(source, limit=limit, lines=_dataset_lines):
        yield conversation_of(body, place)


def _dataset_lines(path: Path) -> Iterator[str]:
    """Stream the file line by line, as `datasets` takes dates for numbers when it reads JSON
    itself.

    Nothing is copied into a cache folder that ranks would race for.
    """
    import datasets

    with path.open("rb"):  # for the system's own message about an unreadable file
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
    """Convert an object of `placed_rows` to a row.

    Raises:
        UsageError: it lacks `messages` or `answer`, or they have another form; names the place.
    """
    row = conversation_of(body, place)
    if not isinstance(row, AnsweredRow):
        raise UsageError(
            f"{place}: no `answer`; keys: {', '.join(body)}",
            hint=f"expected {_FORM}; without `answer` only SFT can use a row",
        )
    return row


def conversation_of(body: Mapping[str, Any], place: str) -> Conversation:
    """Convert an object of `placed_rows` to a row or, without `answer`, to a conversation.

    Raises:
        UsageError: as `row_of`; without `answer`, no message comes from the assistant.
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
    """The message without null keys (parquet gives every message the keys of all); missing content,
    as beside tool calls, becomes the empty text that servers write for it.
    """
    kept = {key: value for key, value in given.items() if value is not None}
    return {"role": given["role"], "content": "", **kept}


def _fault(body: Mapping[str, Any]) -> str:
    """The fault of a row, or an empty string."""
    messages, answer = body.get("messages"), body.get("answer")
    if messages is None:
        return f"no `messages`; keys: {', '.join(body) or 'none'}"
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list with at least one message"
    for message in messages:
        if not _is_message(message):
            return f"each message needs text `role` and `content`, got {message!r:.80}"
    if answer is None and all(message["role"] != "assistant" for message in messages):
        return f"no `answer`, and no message from the assistant; keys: {', '.join(body)}"
    if not isinstance(answer, str | None):
        return f"`answer` must be text, got {type(answer).__name__}"
    return ""


def _is_message(message: object) -> bool:
    """Whether it has a role and text; beside other content, such as tool calls, no text is
    needed."""
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
