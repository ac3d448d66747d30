"""The wire format of results: marked lines on standard output.

A results folder may be full or invisible on one node, which preflight must find out, but output
comes back through srun in any case. Slurm cuts long lines and mixes the pieces of different tasks,
so messages are split into short numbered lines.
"""

import base64
import binascii
import json
import sys
import zlib
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

_MARK = "@shakedown"
_CHUNK = 600  # characters; Slurm cuts at 1024
# A damaged line may contain any number.
_MAX_CHUNKS = 10_000


def encode(body: Mapping[str, Any]) -> list[str]:
    """The lines of one message."""
    # Base 85 is denser than base 64, and has no blanks, which separate a line's fields.
    packed = base64.b85encode(zlib.compress(json.dumps(body).encode())).decode()
    chunks = [packed[i : i + _CHUNK] for i in range(0, len(packed), _CHUNK)]
    label = uuid4().hex[:12]
    return [f"{_MARK} {label} {n}/{len(chunks)} {chunk}" for n, chunk in enumerate(chunks, 1)]


def emit(body: Mapping[str, Any]) -> None:
    """Print one message."""
    # Begins with a line break, as another program may have left its line unfinished.
    sys.stdout.write("".join(f"\n{line}\n" for line in encode(body)))
    sys.stdout.flush()


class WireDecoder:
    """A decoder that finds the messages in a log that arrives in pieces."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, str]] = {}
        self._rest = b""

    def feed(self, body: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete, in order; a line may continue in the next
        piece."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        found = (self._take(line.decode(errors="replace").rstrip("\r")) for line in lines)
        return [message for message in found if message is not None]

    def _take(self, line: str) -> dict[str, Any] | None:
        fields = line.split(" ")
        if len(fields) != 4 or fields[0] != _MARK:
            return None
        label, (number, total) = fields[1], _fraction(fields[2])
        chunks = self._parts.setdefault(label, {})
        chunks[number] = fields[3]
        if not total or len(chunks) != total:
            return None
        del self._parts[label]
        return _unpack("".join(chunks[key] for key in sorted(chunks)))


def plain_lines(text: str) -> list[str]:
    """The lines that are not messages: warnings, tracebacks."""
    return [line for line in text.splitlines() if line and not line.startswith(_MARK)]


def _fraction(text: str) -> tuple[int, int]:
    number, _, total = text[:20].partition("/")  # int() refuses thousands of digits
    if number.isdecimal() and total.isdecimal() and int(total) <= _MAX_CHUNKS:
        return int(number), int(total)
    return 0, 0


def _unpack(packed: str) -> dict[str, Any] | None:
    """A damaged message counts as missing."""
    try:
        body = json.loads(zlib.decompress(base64.b85decode(packed)))
    except (ValueError, zlib.error, binascii.Error):
        return None
    return body if isinstance(body, dict) else None
