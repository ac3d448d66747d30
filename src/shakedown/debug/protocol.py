"""Messages of the Debug Adapter Protocol: a header with their length, then JSON.

https://microsoft.github.io/debug-adapter-protocol/overview#base-protocol
"""

import json
import re
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

DapMessage = dict[str, Any]
MOST_BYTES = 1 << 26  # of a message: variables and sources go as one
_LENGTH = re.compile(rb"content-length:\s*([0-9]{1,9})\s*", re.IGNORECASE)
_LONGEST_HEADER = 4096


class ProtocolError(Exception):
    """What came is no message of the protocol."""


def read_message(stream: BinaryIO, most: int = MOST_BYTES) -> DapMessage | None:
    """The next message; None at the end of the stream.

    Args:
        most: bytes that it may have.

    Raises:
        ProtocolError: it is no message, or too long.
        OSError: the connection broke, or a time-out of its socket is over.
    """
    length = None
    while True:
        line = stream.readline(_LONGEST_HEADER)
        if not line:
            return None
        if match := _LENGTH.fullmatch(line):
            length = int(match[1])
        elif not line.strip():
            break
    if length is None or length > most:
        raise ProtocolError(f"a message of {length} bytes, expected at most {most}")
    body = stream.read(length)
    if len(body) < length:
        return None
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message


class DapSender:
    """Writes whole messages, from several threads."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._lock = write, threading.Lock()

    def send(self, message: DapMessage) -> None:
        """
        Raises:
            OSError: the connection broke.
        """
        body = json.dumps(message).encode()
        with self._lock:
            self._write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
