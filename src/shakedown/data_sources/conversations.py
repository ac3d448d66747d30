"""Rows to train and evaluate on: each a conversation, most with the answer to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.read import placed_rows

_FORM = '{"messages": [{"role": "user", "content": "..."}], "answer": "..."}'


@dataclass(frozen=True)
class Conversation:
    """`messages`, each with `role` and `content`; at least one of them is the assistant's."""

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Row(Conversation):
    """A conversation up to the question, and its answer."""

    answer: str


def load_rows(source: str, *, limit: int | None = None) -> list[Row]:
    """Read a data set.

    Args:
        source: as `shakedown.data_sources` names it: a file, `hub:NAME[:SPLIT]`, a known data set.
        limit: read at most this many rows.

    Raises:
        UsageError: it cannot be read, has no rows, or a row lacks `messages` or `answer`;
            names the file and the line.
        BlockedError: the hub's data set cannot be had.
    """
    return list(iter_rows(source, limit=limit))


def iter_rows(source: str, *, limit: int | None = None) -> Iterator[Row]:
    """The rows of `load_rows`, one at a time as they are read."""
    for place, body in placed_rows(source, limit=limit, lines=_dataset_lines):
        yield row_of(body, place)


def iter_conversations(source: str, *, limit: int | None = None) -> Iterator[Conversation]:
    """Rows with an answer, and conversations without: what SFT trains on.

    Raises:
        UsageError, BlockedError: as `load_rows`, but for a row without `answer`.
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


def row_of(body: Mapping[str, Any], place: str) -> Row:
    """The row that an object of `placed_rows` is.

    Raises:
        UsageError: it lacks `messages` or `answer`, or they are of another form; names the place.
    """
    row = conversation_of(body, place)
    if not isinstance(row, Row):
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
    messages = tuple({"role": m["role"], "content": m["content"]} for m in body["messages"])
    answer = body.get("answer")
    return Conversation(messages) if answer is None else Row(messages, answer)


def _fault(body: Mapping[str, Any]) -> str:
    """What is wrong with a row, or an empty string."""
    messages, answer = body.get("messages"), body.get("answer")
    if messages is None:
        return f"no `messages`; keys: {', '.join(body) or 'none'}"
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list with at least one message"
    for message in messages:
        parts = (
            [message.get(k) for k in ("role", "content")] if isinstance(message, Mapping) else []
        )
        if not parts or not all(isinstance(part, str) for part in parts):
            return f"each message needs text `role` and `content`, got {message!r:.80}"
    if answer is None and all(message["role"] != "assistant" for message in messages):
        return f"no `answer`, and no message of the assistant; keys: {', '.join(body)}"
    if not isinstance(answer, str | None):
        return f"`answer` must be text, got {type(answer).__name__}"
    return ""
