"""Atomic writes, so that a reader sees the old file or the new one, never half; and JSON
reading."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

from shakedown.core.errors import ShakedownError, StorageError, UsageError, storage_hint
from shakedown.core.leftovers import temporary_file
from shakedown.core.private import file_mode, make_folders, read_own

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Parsed = TypeVar("Parsed")
Unknown = Literal["forbid", "ignore"]


@contextlib.contextmanager
def atomic_open(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` and rename it over `path` on success.

    Raises:
        StorageError: the folder cannot be written or the file system is full.
    """
    temporary = ""
    try:
        make_folders(path.parent)
        # Beside `path`, as a rename is atomic within one file system only.
        handle, temporary = temporary_file(path)
        encoding = None if "b" in mode else "utf-8"
        with os.fdopen(handle, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            # Without this a crash of the host can leave an empty file under the new name.
            os.fsync(stream.fileno())
        # mkstemp makes files that only their owner may read.
        os.chmod(temporary, file_mode())
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            hint=storage_hint(error),
        ) from error
    finally:
        if temporary:
            # After the rename nothing is left here; this deletes the rest of a failed write.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    with atomic_open(path) as stream:
        stream.write(text)


def write_json(
    path: Path, body: Mapping[str, Any] | list[Any], *, times: tuple[int, int] | None = None
) -> None:
    """Write JSON atomically; NaN and infinities are refused, as JSON has neither.

    Args:
        times: of the last read and change in ns, which the file has from its first moment.
    """
    with atomic_open(path) as stream:
        stream.write(json.dumps(body, indent=2, allow_nan=False, default=_plain) + "\n")
        stream.flush()
        if times is not None:
            os.utime(stream.fileno(), ns=times)


def read_object(
    path: Path,
    what: str,
    *,
    schema: str = "",
    hint: str = "",
    error_class: type[ShakedownError] = UsageError,
    control: bool = False,
) -> dict[str, Any]:
    """Read a file that holds one JSON object; the key `schema` is checked and removed.

    Args:
        what: what the file should be, for messages.
        schema: the expected value of the key; empty: not checked.
        error_class: StorageError for a file that only a run's own processes write.
        control: whether it controls what runs; then nobody else may have written it.

    Raises:
        UsageError: or `error_class`: missing, unreadable, not JSON, not an object, or another
        schema. UntrustedError: a control file that others can write.
    """
    try:
        body = json.loads(read_own(path) if control else path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise error_class(f"cannot read {what} {path}: {reason}", hint=hint) from error
    except ValueError as error:
        raise error_class(f"{path} is not JSON: {error}", hint=hint) from error
    except RecursionError as error:
        # json's parser recurses once per level, so a crafted or damaged file can exhaust the stack.
        raise error_class(f"{path} cannot be read: nested too deeply", hint=hint) from error
    if not isinstance(body, dict):
        found = type(body).__name__
        raise error_class(
            f"{path} is not a valid {what}: expected an object, got {found}", hint=hint
        )
    if schema and body.pop("schema", None) != schema:
        raise error_class(f'{path} is not a valid {what}: expected "schema": "{schema}"', hint=hint)
    return body


def read_json_as(
    kind: type[Parsed],
    path: Path,
    what: str,
    *,
    schema: str = "",
    unknown: Unknown = "forbid",
    hint: str = "",
    error_class: type[ShakedownError] = UsageError,
) -> Parsed:
    """Read a control file that holds one dataclass as JSON: `read_object`, then `json_as`.

    Raises:
        UsageError: (or `error_class`) as these two.
        UntrustedError: others can write the file.
    """
    body = read_object(path, what, schema=schema, hint=hint, error_class=error_class, control=True)
    try:
        return json_as(kind, body, unknown=unknown)
    except ValueError as error:
        raise error_class(f"{path} is not a valid {what}: {error}", hint=hint) from error


def json_as(kind: type[Parsed], body: Mapping[str, Any], *, unknown: Unknown = "forbid") -> Parsed:
    """A dataclass from parsed JSON, strictly typed: no text for a number, no infinity.

    Args:
        unknown: `ignore` keys that another version may have written.

    Raises:
        ValueError: names the first keys that do not fit, with what was given and expected.
    """
    from pydantic import ValidationError

    try:
        adapter: TypeAdapter[Parsed] = _adapter(kind, unknown)  # type: ignore[arg-type]
        # Strict validation accepts lists for tuples only in JSON, hence the text. Half a surrogate
        # pair (from a cut text) has no UTF-8 form and becomes a question mark.
        text = json.dumps(body, ensure_ascii=False)
        return adapter.validate_json(text.encode("utf-8", "replace"))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        listed = "; ".join(map(_explain, faults[:3])) + ("; ..." if len(faults) > 3 else "")
        raise ValueError(listed) from None
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@functools.cache
def _adapter(kind: Any, unknown: Unknown) -> "TypeAdapter[Any]":
    # Imported here because pydantic takes a tenth of a second, and light commands read no such
    # file.
    from pydantic import ConfigDict, TypeAdapter

    settings = ConfigDict(strict=True, allow_inf_nan=False, extra=unknown)
    # Pydantic lets only a dataclass itself set its configuration, but passes a union's on to plain
    # dataclasses, also nested ones. A body is never null.
    return TypeAdapter(kind | None, config=settings)


def _explain(fault: Any) -> str:
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] == "unexpected_keyword_argument":
        return f"{key}: unknown key"
    if fault["type"] == "missing":
        return f"{key}: missing"
    return f"{key}: {fault['msg']}, got {fault['input']!r:.80}"


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a count: an integer from 0 up to the largest exact float."""
    # bool is a subclass of int; above 2**53 not every integer is a float.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
