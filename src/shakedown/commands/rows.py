"""Data rows for commands: a JSON-lines file, or `hub:NAME[:SPLIT]` through `datasets`."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shakedown.commands.assets_file import read_assets
from shakedown.config import Config
from shakedown.errors import BlockedError, UsageError, did_you_mean
from shakedown.paths import RunPaths

Row = dict[str, Any]


def read_rows(spec: str, *, limit: int | None = None) -> list[Row]:
    """Read at most `limit` rows.

    Raises:
        UsageError: no such file, a line that is no JSON object, no rows.
        BlockedError: the hub's data set cannot be had.
    """
    rows = _hub_rows(spec) if spec.startswith("hub:") else _file_rows(Path(spec))
    taken = list(itertools.islice(rows, limit))
    if not taken:
        raise UsageError(f"{spec} holds no rows")
    return taken


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        siblings = [p.name for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot read data {path}: {reason}{did_you_mean(path.name, siblings)}",
            hint="give a JSON-lines file, or hub:NAME[:SPLIT]",
        ) from error


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
    return row


def _hub_rows(spec: str) -> Iterator[Row]:
    name, _, split = spec.removeprefix("hub:").partition(":")
    try:
        from datasets import load_dataset

        table = load_dataset(name, split=split or "train", streaming=True)
        yield from (dict(row) for row in table)
    except Exception as error:  # the library raises many kinds: network, parsing
        raise BlockedError(
            f"cannot read {spec}: {type(error).__name__}: {str(error)[:300]}",
            hint="check the name and the network, or write the rows to a JSON-lines file",
        ) from error


def heldout_source(config: Config) -> str:
    """The held-out rows of a run; the demo's lie where `shakedown assets` wrote them.

    Raises:
        UsageError: the demo's rows were not written yet.
    """
    if config.data.heldout != "demo":
        return config.data.heldout
    folder = RunPaths(Path(config.results) / config.run).assets
    return read_assets(folder / "assets.json").heldout
