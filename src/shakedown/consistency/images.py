"""Images of data rows: found, read and checked. Rows may be hostile; no network is used."""

import base64
import binascii
import io
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shakedown.core.errors import UsageError

_BYTES = 20 * 2**20  # limit of one encoded image
_PIXELS = 4096 * 4096
_FORMATS = ("PNG", "JPEG", "WEBP")
_FORM = 'a data:image/png;base64 URI, a file beside the data, or {"bytes": ..., "path": ...}'


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has non-text content: in its messages, `images` or `image`."""
    return bool(row.get("images") or row.get("image")) or any(True for _ in _parts(row))


def take_images(
    row: Mapping[str, Any], place: str, folder: Path | None
) -> tuple[list[Mapping[str, Any]], list[bytes]]:
    """The messages with a bare `{"type": "image"}` for each image, and the images as RGB PNG.

    Parts without their own image take those of the row's `images`, in order.

    Args:
        folder: the data file's folder, to which relative paths refer and which no path may leave.

    Raises:
        UsageError: an unreadable image, or images that no message shows; names `place`.
    """
    given = row.get("messages") or row.get("prompt")
    listed = row.get("images") or row.get("image") or []
    rest = iter(listed if isinstance(listed, list) else [listed])
    messages, found = [], []
    for message in given if isinstance(given, list) else []:
        content = message.get("content")
        parts = []
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "image", "image_url"):
                raise UsageError(f"{place}: content of type {kind!r}: expected text or image")
            if kind != "text":
                found.append(_png(_source(part, rest), place, folder))
            parts.append(dict(part) if kind == "text" else {"type": "image"})
        messages.append({**message, "content": parts} if parts else message)
    if not found or next(rest, None) is not None:
        raise UsageError(
            f"{place}: the row has images that no message shows",
            hint='put {"type": "image"} into the content of a message for each image',
        )
    return messages, found


def with_images(messages: Sequence[Any], images: Sequence[bytes]) -> list[Any]:
    """Messages of `take_images` in OpenAI's chat form, with PNG in data URIs."""
    rest = iter(images)

    def shown(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part["type"] != "image":
            return part
        text = base64.b64encode(next(rest)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}

    return [
        {**m, "content": [shown(part) for part in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]


def _parts(row: Mapping[str, Any]) -> Iterator[Any]:
    given = row.get("messages") or row.get("prompt")
    for message in given if isinstance(given, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                yield part


def _source(part: Mapping[str, Any], rest: Iterator[Any]) -> Any:
    for key in ("image", "image_url", "url", "path"):
        found = part.get(key)
        if found is not None:
            return found.get("url") if key == "image_url" and isinstance(found, Mapping) else found
    return next(rest, None)


def _png(source: Any, place: str, folder: Path | None) -> bytes:
    from PIL import Image

    raw = _raw(source, place, folder)
    if len(raw) > _BYTES:
        raise UsageError(f"{place}: an image of {len(raw)} bytes; at most {_BYTES} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(raw), formats=_FORMATS) as image:
                # Only the header has been read so far.
                if image.width * image.height > _PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels, at most {_PIXELS}")
                out = io.BytesIO()
                image.convert("RGB").save(out, "PNG")
    # A decoder may raise nearly anything for damaged bytes.
    except Exception as error:
        raise UsageError(
            f"{place}: unreadable image: {str(error)[:200]}",
            hint=f"expected {', '.join(_FORMATS)}",
        ) from error
    return out.getvalue()


def _raw(source: Any, place: str, folder: Path | None) -> bytes:
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if hasattr(source, "save"):  # already decoded, as `datasets` returns it
        out = io.BytesIO()
        source.convert("RGB").save(out, "PNG")
        return out.getvalue()
    if not isinstance(source, str) or not source:
        raise UsageError(f"{place}: an image is missing", hint=f"expected {_FORM}")
    if source.startswith("data:"):
        return _of_uri(source, place)
    if "://" in source:
        raise UsageError(
            f"{place}: the image {source[:100]!r} is not fetched", hint=f"expected {_FORM}"
        )
    return _of_file(source, place, folder)


def _of_uri(source: str, place: str) -> bytes:
    head, _, body = source.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise UsageError(f"{place}: {head[:60]!r} is not a base64 image", hint=f"expected {_FORM}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{place}: an image that is not base64: {error}") from error


def _of_file(source: str, place: str, folder: Path | None) -> bytes:
    try:
        root = folder.resolve() if folder else None
        path = (root / source).resolve() if root else None
        if root is None or path is None or not path.is_relative_to(root):
            raise UsageError(f"{place}: image {source[:100]!r} is outside the data's folder")
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{place}: image {source[:100]!r} is not a regular file")
        with path.open("rb") as file:
            return file.read(_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: cannot read image {source[:100]!r}: {error}") from error
