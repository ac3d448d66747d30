"""The journal of a comparison's results so far, from which a stopped one continues.

parts/identity.json   the compared sides: rows of another comparison are dropped
parts/00000.jsonl     one part of the prompts: one row per sample and act, written as it arrives

A comparison that ends removes the folder.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from shakedown.core.errors import StorageError, UsageError, storage_hint
from shakedown.core.files import read_object, write_json
from shakedown.core.private import file_mode, make_folders
from shakedown.core.rows import JsonLines

Act = Literal["sampled", "greedy", "prefill", "score", "greedy_score", "answers"]
JournalRow = Mapping[str, Any]
Kept = TypeVar("Kept")

_SCHEMA = "shakedown/comparison-parts/1"
# Rows derived from another row's tokens become worthless once that row is made again.
_MADE_OF: Mapping[str, tuple[Act, ...]] = {
    "sampled": ("prefill", "score", "answers"),
    "greedy": ("greedy_score", "answers"),
}


class PartJournal:
    """The rows of one part; a half-written last row, from a killed process, is cut off.

    Raises:
        StorageError: the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[tuple[int, str], JournalRow] = {}
        try:
            self._read()
        except OSError as error:
            raise _cannot(path, error) from error

    def get(self, sample: int, act: Act) -> JournalRow | None:
        return self._rows.get((sample, act))

    def put(self, sample: int, act: Act, row: JournalRow) -> None:
        """Keep a row, in memory and at the end of the file."""
        line = json.dumps({"sample": sample, "act": act, "row": row}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line)
        except OSError as error:
            raise _cannot(self._path, error) from error
        self._take(sample, act, row)

    def count(self, *acts: Act) -> int:
        """The number of samples with a row for each of these acts."""
        samples = {sample for sample, _ in self._rows}
        return sum(all((s, act) in self._rows for act in acts) for s in samples)

    def _take(self, sample: int, act: str, row: JournalRow) -> None:
        for later in _MADE_OF.get(act, ()):
            self._rows.pop((sample, later), None)
        self._rows[sample, act] = row

    def _read(self) -> None:
        if not self._path.exists():
            self._path.touch(mode=file_mode())
            return
        lines = JsonLines(self._path, fits=_is_row)
        for body in lines:
            self._take(body["sample"], body["act"], body["row"])
        os.truncate(self._path, lines.whole)
        if lines.damage:
            print(f"{self._path}: {lines.damage}: will be made again", file=sys.stderr, flush=True)


def _is_row(body: Mapping[str, Any]) -> bool:
    match body:
        case {"sample": int(), "act": str(), "row": dict()}:
            return True
    return False


def recalled(
    journal: PartJournal, sample: int, act: Act, build: Callable[[JournalRow], Kept]
) -> Kept | None:
    """The content of a journal row; None if it is missing or damaged."""
    row = journal.get(sample, act)
    try:
        return None if row is None else build(row)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


class ComparisonParts:
    """The journals of one comparison.

    Args:
        folder: `parts/` of the results folder.
        identity: everything that the rows depend on.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        text = json.dumps(identity, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        self.resumed = self._is_of(digest)
        if not self.resumed:
            self.remove()
            make_folders(folder)
            write_json(folder / "identity.json", {"schema": _SCHEMA, "sha256": digest})

    def journal(self, number: int) -> PartJournal:
        return PartJournal(self.folder / f"{number:05d}.jsonl")

    def remove(self) -> None:
        """Remove the journals, once the result is written or worthless."""
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as error:
            raise _cannot(self.folder, error) from error

    def _is_of(self, digest: str) -> bool:
        path = self.folder / "identity.json"
        try:
            found = read_object(path, "identity of a comparison", schema=_SCHEMA)
        except UsageError:
            return False
        return found.get("sha256") == digest


def state_of(model: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a model folder's files, which change with it; [] for a hub name."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    facts = [(path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(path.name, fact.st_size, fact.st_mtime_ns) for path, fact in facts]


def _cannot(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot use {path}: {error.strerror or error}",
        hint=storage_hint(error, "choose another results folder: --out"),
    )
