"""Atomic writes: a reader sees the old file or the new one, never half of it. And reads of JSON."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeGuard

from shakedown.core.errors import StorageError, UsageError


@contextlib.contextmanager
def atomic_open(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` and rename it over `path` on success.

    Raises:
        StorageError: the folder cannot be written or the file system is full.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        encoding = None if "b" in mode else "utf-8"
        with os.fdopen(handle, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="free space on that file system or choose another results folder",
        ) from error
    finally:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    with atomic_open(path) as stream:
        stream.write(text)


def write_json(path: Path, body: Mapping[str, Any] | list[Any]) -> None:
    """Write JSON atomically; NaN and infinities are refused, as JSON has none."""
    write_text(path, json.dumps(body, indent=2, allow_nan=False, default=_plain) + "\n")


def read_object(path: Path, what: str, *, schema: str = "", hint: str = "") -> dict[str, Any]:
    """Read a file that holds one JSON object; the key `schema` is checked and taken out.

    Args:
        what: what the file should be, for messages.
        schema: the value of the key; empty: not asked for.

    Raises:
        UsageError: missing, unreadable, not JSON, no object, of another schema.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read {what} {path}: {reason}", hint=hint) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint=hint) from error
    except RecursionError as error:
        raise UsageError(f"{path} is not JSON for us: nested too deeply", hint=hint) from error
    if not isinstance(body, dict):
        found = type(body).__name__
        raise UsageError(f"{path} is no {what}: expected an object, got {found}", hint=hint)
    if schema and body.pop("schema", None) != schema:
        raise UsageError(f'{path} is no {what}: expected "schema": "{schema}"', hint=hint)
    return body


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value out of JSON counts something: an integer from 0 to what a float holds."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
