"""Messages of the Debug Adapter Protocol: a header with their length, then JSON.

https://microsoft.github.io/debug-adapter-protocol/overview#base-protocol
"""

import json
import re
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

DapMessage = dict[str, Any]
MOST_BYTES = 1 << 26  # size of a message, which may hold whole sources or variables
_LENGTH = re.compile(rb"content-length:\s*([0-9]{1,9})\s*", re.IGNORECASE)
_LONGEST_HEADER = 4096


class ProtocolError(Exception):
    """The received bytes are not a message of the protocol."""


def read_message(stream: BinaryIO, most: int = MOST_BYTES) -> DapMessage | None:
    """The next message; None at the end of the stream.

    Args:
        most: largest allowed size in bytes.

    Raises:
        ProtocolError: it is not a message, or too long.
        OSError: the connection broke, or its socket timed out.
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
    """A thread-safe writer of whole messages."""

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
