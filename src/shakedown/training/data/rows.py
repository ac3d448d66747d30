"""Data sets: JSON lines on disk or `hub:NAME[:SPLIT]`, read with `datasets` and checked."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.errors import UsageError

HUB_PREFIX = "hub:"
DEFAULT_SPLIT = "train"
_FORM = '{"messages": [{"role": "user", "content": "..."}], "answer": "..."}'


@dataclass(frozen=True)
class Row:
    """A conversation to answer (`messages`, each with `role` and `content`) and its answer."""

    messages: tuple[Mapping[str, str], ...]
    answer: str


def load_rows(source: str, *, limit: int | None = None) -> list[Row]:
    """Read a data set.

    Args:
        source: a JSON-lines file or `hub:NAME[:SPLIT]` (split `train` when left out).
        limit: read at most this many rows.

    Raises:
        UsageError: it cannot be read, has no rows, or a row lacks `messages` or `answer`;
            names the file and the line.
    """
    try:
        found = [
            _checked(body, source, number)
            for number, body in enumerate(itertools.islice(_stream(source), limit), start=1)
        ]
    except UsageError:
        raise
    except Exception as error:  # `datasets` raises many kinds, some of pyarrow
        raise _unreadable(source, error) from error
    if not found:
        raise UsageError(f"data set {source} has no rows", hint=f"write rows like {_FORM}")
    return found


def is_hub(source: str) -> bool:
    """Whether `source` names a data set on the hub."""
    return source.startswith(HUB_PREFIX)


def _stream(source: str) -> Iterator[Any]:
    """Streamed, so that nothing is copied into a cache folder that ranks would race for."""
    import datasets

    if is_hub(source):
        name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
        yield from datasets.load_dataset(name, split=split or DEFAULT_SPLIT, streaming=True)
        return
    if not Path(source).is_file():
        raise UsageError(
            f"data set {source} does not exist",
            hint="give a JSON-lines file, `demo`, or hub:NAME[:SPLIT]",
        )
    files = {DEFAULT_SPLIT: source}
    yield from datasets.load_dataset("json", data_files=files, split=DEFAULT_SPLIT, streaming=True)


def _checked(body: Any, source: str, number: int) -> Row:
    fault = _fault(body)
    if fault:
        raise UsageError(f"{source}, line {number}: {fault}", hint=f"expected {_FORM}")
    messages = tuple({"role": m["role"], "content": m["content"]} for m in body["messages"])
    return Row(messages, body["answer"])


def _fault(body: Any) -> str:
    """What is wrong with a row, or an empty string."""
    if not isinstance(body, Mapping):
        return f"expected an object, got {type(body).__name__}"
    for key in ("messages", "answer"):
        if body.get(key) is None:
            return f"no `{key}`; keys: {', '.join(map(str, body)) or 'none'}"
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


def _unreadable(source: str, error: Exception) -> UsageError:
    where = "" if is_hub(source) else _first_bad_line(Path(source))
    reason = where or f": {type(error).__name__}: {str(error).strip().splitlines()[-1:] or ''}"
    return UsageError(f"cannot read data set {source}{reason}", hint=f"one row a line: {_FORM}")


def _first_bad_line(path: Path) -> str:
    """Where a JSON-lines file stops being one; empty when every line is an object of its own."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                body = json.loads(line) if line.strip() else {}
                if not isinstance(body, dict):
                    return f", line {number}: expected an object, got {type(body).__name__}"
    except UnicodeDecodeError as error:
        return f": not UTF-8 text: {error.reason} at byte {error.start}"
    except OSError as error:
        return f": {error.strerror}"
    except ValueError as error:
        return f", line {number}: not JSON: {error}"
    return ""
