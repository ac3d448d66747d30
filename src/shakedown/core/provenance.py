"""The provenance of a stage's steps: settings and content digests, and which steps ran with them.

`provenance.jsonl` has one row for each attempt that began: the step after which it continued, and
what it was asked to use. There is no other record of how a result was made.
"""

import ast
import functools
import hashlib
import importlib.machinery
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from shakedown.core.errors import UsageError
from shakedown.core.files import is_count, read_json_as, write_json
from shakedown.core.verdict import Finding

CHECK = "settings_changed"
Made = Mapping[str, str]

_CHUNK = 4 << 20  # bytes read at a time
_AT_ONCE = 8  # files read at once: hashlib leaves the other cores free
_TOLD_BYTES = 4 << 30  # above this, reading takes so long that the user is told
# A file that is rewritten within one clock tick has the same time of change.
_SETTLED_SECONDS = 2.0
# At most this many of the user's modules count; docs/training.md says so.
_MAX_MODULES = 256
_MAX_MODULE_BYTES = 1 << 20
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class ReadFile:
    """A file as it was when read, and the SHA-256 of its content."""

    size: int
    changed: int  # ns
    digest: str


@dataclass(frozen=True)
class _Kept:
    files: Mapping[str, ReadFile] = field(default_factory=dict)


class Contents:
    """Digests of whole files. Each is read once; `kept` recognises it by path, size and time of
    change.

    A damaged or missing list is made again.
    """

    def __init__(self, kept: Path) -> None:
        self._path = kept
        try:
            self._files = dict(read_json_as(_Kept, kept, "list of digests").files)
        except UsageError:
            self._files = {}

    def digest(self, files: Iterable[Path]) -> str:
        """For one file the start of its sha256sum, for several a digest of their names and sums.

        Raises:
            OSError: one cannot be read.
        """
        listed = sorted(files)
        unread = sum(path.stat().st_size for path in listed if self._known(path) is None)
        if unread > _TOLD_BYTES:
            print(f"reading {unread / 1e9:.0f} GB of {listed[0].parent}, once", flush=True)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            sums = list(pool.map(self._sum, listed))
        if len(sums) == 1:
            return f"sha256:{sums[0][:16]}"
        named = "".join(f"{path.name} {each}\n" for path, each in zip(listed, sums, strict=True))
        return f"sha256:{hashlib.sha256(named.encode()).hexdigest()[:16]}"

    def keep(self) -> None:
        """Write the list for later readers.

        Raises:
            StorageError: it cannot be written.
        """
        write_json(self._path, asdict(_Kept(self._files)))

    def _known(self, path: Path) -> ReadFile | None:
        """The digest; None if the file was not read yet, or was written since."""
        facts, known = path.stat(), self._files.get(str(path.absolute()))
        same = known and (known.size, known.changed) == (facts.st_size, facts.st_mtime_ns)
        return known if same else None

    def _sum(self, path: Path) -> str:
        if known := self._known(path):
            return known.digest
        facts = path.stat()
        digest = _read(path)
        if time.time() - facts.st_mtime > _SETTLED_SECONDS:
            self._files[str(path.absolute())] = ReadFile(facts.st_size, facts.st_mtime_ns, digest)
        return digest


def source_file(target: str) -> Path | None:
    """The file of `package.module:name` or `path/to/file.py:name`, found without importing it.

    None if neither the current folder nor Python's path has it, and for a name without a location.
    """
    place = target.rpartition(":")[0]
    if not place:
        return None
    if place.endswith(".py"):
        return Path(place).absolute() if Path(place).is_file() else None
    found, name, searched = None, "", ["", *sys.path]
    for part in place.split("."):
        name = f"{name}.{part}" if name else part
        found = importlib.machinery.PathFinder.find_spec(name, searched)
        if found is None:
            return None
        searched = list(found.submodule_search_locations or ())
    return Path(found.origin).absolute() if found and found.origin else None


def source_files(target: str) -> list[Path]:
    """A target's file, and the files that it imports, directly or not, from its own folder or
    package.

    Nothing is imported to find them, so an import by a computed name is not seen.

    Raises:
        OSError: one cannot be read.
    """
    first = source_file(target)
    if first is None:
        return []
    root = tree = first.parent
    waiting = [first]
    while (package := root / "__init__.py").is_file():
        waiting.append(package)
        root, tree = root.parent, root
    found = set(waiting)
    if tree.name in _INSTALLED:
        return [first]
    inside = tree.resolve()
    while waiting and len(found) < _MAX_MODULES:
        path = waiting.pop()
        facts = path.stat()
        if facts.st_size > _MAX_MODULE_BYTES or path.suffix != ".py":
            continue
        for level, name in _imports(path, facts.st_size, facts.st_mtime_ns):
            base = path.parents[level - 1] if 0 < level <= len(path.parents) else root
            for module in _modules(base, name):
                own = module.resolve().is_relative_to(inside)
                if own and module not in found and len(found) < _MAX_MODULES:
                    found.add(module)
                    waiting.append(module)
    return sorted(found)


@functools.lru_cache(maxsize=2 * _MAX_MODULES)
def _imports(path: Path, _size: int, _changed: int) -> Sequence[tuple[int, str]]:
    """Level and dotted name of everything that a file imports; a name may not be a module."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = f"{node.module}." if node.module else ""
            found += [(node.level, f"{within}{alias.name}") for alias in node.names]
    return list(dict.fromkeys(found))


def _modules(base: Path, name: str) -> Iterator[Path]:
    """The files that an import of `a.b.c` runs, as far as they exist."""
    for part in name.split("."):
        base /= part
        for path in (base / "__init__.py", base.with_name(f"{part}.py")):
            if path.is_file():
                yield path
                break


@dataclass(frozen=True)
class Span:
    """Consecutive steps that ran with the same provenance."""

    first: int
    last: int
    made: Made

    def __str__(self) -> str:
        return (
            f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"
        )


def spans(rows: Sequence[Mapping[str, Any]], done: int) -> list[Span]:
    """Which of the `done` steps ran with what; damaged rows are skipped."""
    whole = [row for row in rows if is_count(row.get("step")) and is_made(row.get("made"))]
    ends = [*(row["step"] for row in whole), done][1:]
    found: list[Span] = []
    for row, end in zip(whole, ends, strict=False):
        last, made = min(end, done), row["made"]
        if last <= row["step"]:
            continue
        if found and found[-1].last == row["step"] and not differing(found[-1].made, made):
            found[-1] = Span(found[-1].first, last, found[-1].made)
        else:
            found.append(Span(row["step"] + 1, last, made))
    return found


def differing(before: Made, now: Made) -> dict[str, tuple[str, str]]:
    """Old and new value by name; names that only one side has are skipped."""
    return {
        name: (before[name], now[name])
        for name in now
        if name in before and before[name] != now[name]
    }


def told(changed: Mapping[str, tuple[str, str]]) -> str:
    """`optimizer.lr 0.002 -> 1e-05, seed 0 -> 1`."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())


def judge(
    ran: Sequence[Span], asked: Made, *, steps: int, subject: str, remedy: str, evidence: str = ""
) -> Finding | None:
    """A finding on how the steps that ran differ from those requested; None if they do not.

    It fails if no step ran with what is requested, as that is another result, and if there are more
    than the requested `steps`.
    """
    parts = [(span, differing(span.made, asked)) for span in ran]
    other = [(span, changed) for span, changed in parts if changed]
    done = ran[-1].last if ran else 0
    fit = done - sum(span.last - span.first + 1 for span, _ in other)
    measured = f"{fit} of {done} steps ran with the current settings"
    if done > steps:
        measured, fit = f"{done} steps are done but only {steps} are requested", 0
    elif not other:
        return None
    listed = "; ".join(f"{span} ran before {told(changed)}" for span, changed in other)
    return Finding(
        check=CHECK,
        status="warn" if fit else "fail",
        scope="config",
        subject=subject,
        measured=f"{measured}: {listed}" if listed else measured,
        expected=f"{min(done, steps)} steps with the current settings",
        blame="user",
        evidence=[evidence] if evidence else [],
        remedy=remedy,
    )


def is_made(value: object) -> TypeGuard[Made]:
    """Whether a value from a row can be a provenance."""
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _read(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
