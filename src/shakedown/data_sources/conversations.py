"""Rows to train and evaluate on: each a conversation and its answer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.core.errors import UsageError
from shakedown.data_sources.read import placed_rows

_FORM = '{"messages": [{"role": "user", "content": "..."}], "answer": "..."}'


@dataclass(frozen=True)
class Row:
    """A conversation to answer (`messages`, each with `role` and `content`) and its answer."""

    messages: tuple[Mapping[str, str], ...]
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
    fault = _fault(body)
    if fault:
        raise UsageError(f"{place}: {fault}", hint=f"expected {_FORM}")
    messages = tuple({"role": m["role"], "content": m["content"]} for m in body["messages"])
    return Row(messages, body["answer"])


def _fault(body: Mapping[str, Any]) -> str:
    """What is wrong with a row, or an empty string."""
    for key in ("messages", "answer"):
        if body.get(key) is None:
            return f"no `{key}`; keys: {', '.join(body) or 'none'}"
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list with at least one message"
    for message in messages:
        parts = (
            [message.get(k) for k in ("role", "content")] if isinstance(message, Mapping) else []
        )
        if not parts or not all(isinstance(part, str) for part in parts):
            return f"each message needs text `role` and `content`, got {message!r:.80}"
    if not isinstance(body["answer"], str):
        return f"`answer` must be text, got {type(body['answer']).__name__}"
    return ""
