"""Read rows: a JSON-lines file line by line, parquet and the hub streamed by `datasets`."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shakedown.core.errors import CannotJudgeError, UsageError, did_you_mean
from shakedown.data_sources.source import DEFAULT_SPLIT, HUB_PREFIX, DataSource, parse_source

RowBody = dict[str, Any]
# How a file's lines are read; a reader raises OSError or UnicodeDecodeError.
Lines = Callable[[Path], Iterable[str]]


def plain_lines(path: Path) -> Iterator[str]:
    """The file's lines, without a byte order mark."""
    with path.open(encoding="utf-8-sig") as stream:
        yield from stream


def read_rows(source: str, *, limit: int | None = None, images: bool = False) -> list[RowBody]:
    """The first `limit` rows, or all; with `images`, also the images of a known data set.

    Raises:
        UsageError, CannotJudgeError: as `placed_rows`.
    """
    return [body for _, body in placed_rows(source, limit=limit, images=images)]


def placed_rows(
    source: str,
    *,
    limit: int | None = None,
    lines: Lines = plain_lines,
    images: bool = False,
) -> Iterator[tuple[str, RowBody]]:
    """Rows with their places: `FILE, line N` or `hub:NAME, row N`.

    Rows of a known data set come as `messages` and `answer`; see `shakedown.data_sources`.

    Raises:
        UsageError: no such file, a line that is not a JSON object, no rows, or a row that is not in
        the source's format; names file and line. CannotJudgeError: the hub's data set is not
        available.
    """
    parsed = parse_source(source)
    if parsed.hub:
        rows = _hub_rows(parsed, images)
    elif parsed.place.endswith(".parquet"):
        rows = _parquet_rows(parsed, images)
    else:
        rows = _file_rows(Path(parsed.place), lines)
    place = ""
    for place, body in itertools.islice(rows, limit):
        yield place, parsed.format.row(body, place, images=images) if parsed.format else body
    if not place:
        raise UsageError(f"data set {source} has no rows", hint="write one JSON object per line")


def _file_rows(path: Path, lines: Lines) -> Iterator[tuple[str, RowBody]]:
    try:
        for number, line in enumerate(lines(path), start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, parsed_line(line, place)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def parsed_line(line: str, place: str) -> RowBody:
    """The object of a line.

    Raises:
        UsageError: it is not one; names the place.
    """
    try:
        body = json.loads(line)
        # The file is UTF-8, so only an escape can contain half a surrogate pair.
        if "\\u" in line:
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{place}: not JSON: {reason}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{place}: expected an object, got {type(body).__name__}")
    return body


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> UsageError:
    """The error for a file that cannot be read."""
    siblings = [p.name for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
    if isinstance(error, UnicodeDecodeError):
        reason = f"not UTF-8 text: {error.reason} at byte {error.start}"
    else:
        reason = f"{error.strerror or error}{did_you_mean(path.name, siblings)}"
    return UsageError(
        f"cannot read data set {path}: {reason}",
        hint="give a JSON-lines file, or hub:NAME[:SPLIT]",
    )


def _hub_rows(source: DataSource, images: bool) -> Iterator[tuple[str, RowBody]]:
    """Stream the rows, so that nothing is copied into a cache folder that ranks would race for."""
    name, _, split = source.place.removeprefix(HUB_PREFIX).partition(":")
    config = source.format.hub_config if source.format else ""
    try:
        from datasets import load_dataset

        table = load_dataset(name, config or None, split=split or DEFAULT_SPLIT, streaming=True)
        yield from _table_rows(table, source, images)
    except Exception as error:  # the library raises many kinds of errors: network, parsing
        # Not the user's fault: the name may be right and the hub unreachable.
        raise CannotJudgeError(
            f"cannot read {source.place}: {type(error).__name__}: {str(error)[:300]}",
            hint="check the name and the network, or write the rows to a JSON-lines file",
        ) from error


def _parquet_rows(source: DataSource, images: bool) -> Iterator[tuple[str, RowBody]]:
    path = Path(source.place)
    try:
        path.open("rb").close()  # for the system's own message about an unreadable file
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        from datasets import load_dataset

        table = load_dataset(
            "parquet", data_files={"train": str(path)}, split="train", streaming=True
        )
        yield from _table_rows(table, source, images)
    except Exception as error:  # as above
        raise UsageError(
            f"cannot read data set {path}: {type(error).__name__}: {str(error)[:300]}",
            hint="give a parquet or JSON-lines file, or hub:NAME[:SPLIT]",
        ) from error


def _table_rows(table: Any, source: DataSource, images: bool) -> Iterator[tuple[str, RowBody]]:
    """The rows; unread columns are dropped before anything decodes their images."""
    if source.format and table.column_names:
        kept = (*source.format.columns, *(("images",) if images else ()))
        table = table.remove_columns([name for name in table.column_names if name not in kept])
    for number, row in enumerate(table, start=1):
        yield f"{source.place}, row {number}", dict(row)
