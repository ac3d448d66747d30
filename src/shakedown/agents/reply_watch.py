"""Judge a reply by its bytes while a client reads it: status, HTML, a body or stream cut off."""

import json
import re
import time
from typing import Any

from shakedown.agents.wire import WireCall, out_of_descriptors

_LARGEST = 1 << 24  # bytes of a body that is looked at as JSON; of a stream only both ends are
_ENDS = 512  # bytes of a stream's end that tell whether it is one
# The last events of chat completions, messages and responses.
_LAST = (
    b"[DONE]",
    b"message_stop",
    b"response.completed",
    b"response.incomplete",
    b"response.failed",
)
_ID = re.compile(rb'"id"\s*:\s*"([^"]{1,200})"')
_TIMEOUTS = {"ReadTimeout": "read_timeout", "WriteTimeout": "read_timeout"}
_UNCONNECTED = {"ConnectError", "ConnectTimeout", "PoolTimeout", "ClientConnectorError"}
_CONNECTING = {"ConnectTimeout": "connect_timeout", "PoolTimeout": "pool_timeout"}


class ReplyWatch:
    """Ends a `WireCall` when its reply has ended; `encoded`: compressed, so that none is read."""

    def __init__(self, call: WireCall, status: int, kind: str, *, encoded: bool = False) -> None:
        self._call, self._status, self._kind = call, status, kind.lower()
        self._stream, self._encoded = "event-stream" in self._kind, encoded
        self._head, self._tail, self._size = bytearray(), b"", 0
        call.heard = time.time()

    def feed(self, data: bytes) -> None:
        """The next bytes that the client reads."""
        self._size += len(data)
        room = (_ENDS if self._stream else _LARGEST) - len(self._head)
        self._head += data[: max(room, 0)]
        self._tail = (self._tail + data)[-_ENDS:]

    def end(self, error: BaseException | None = None) -> None:
        """The reply has come to its end, or broke off by `error`."""
        if self._status >= 400:
            self._refused()
        elif error is not None:
            fault = fault_of(error, answered=True)
            self._call.end(self._status, fault, f"after {self._size} bytes: {_said(error)}")
        elif self._encoded:
            self._call.end(self._status)
        elif self._stream:
            self._end_stream()
        else:
            self._end_body()

    def left(self) -> None:
        """The client closed it; what it read may be all there is."""
        if self._status >= 400 or (self._stream and self._finished):
            self.end()
        else:
            self._call.leave(self._status)

    @property
    def _finished(self) -> bool:
        return any(mark in self._tail for mark in _LAST)

    def _end_stream(self) -> None:
        if self._encoded or self._finished:
            found = _ID.search(self._head)
            reply = found.group(1).decode(errors="replace") if found else ""
            self._call.end(self._status, reply=reply)
        else:
            detail = f"the stream broke off after {self._size} bytes"
            self._call.end(self._status, "truncated", detail)

    def _end_body(self) -> None:
        if self._size > _LARGEST:
            self._call.end(self._status)
            return
        body = _object(self._head)
        error = body.get("error") if body is not None else None
        if body is None:
            detail = f"status {self._status} with {self._kind or 'no type'}, which is no JSON "
            self._call.end(self._status, "bad_reply", f"{detail}object: {self._text()}")
        elif error:
            self._call.end(self._status, "bad_reply", f"status {self._status} with error {error}")
        else:
            self._call.end(self._status, reply=str(body.get("id") or ""))

    def _refused(self) -> None:
        body = _object(self._head)
        told = (body or {}).get("error") or (body or {}).get("message") or self._text()
        message = str(told.get("message") or told) if isinstance(told, dict) else str(told)
        unknown = self._status == 404 and "model" in message.lower()
        fault = "unknown_model" if unknown else "api_status"
        self._call.end(self._status, fault, f"status {self._status}: {message}")

    def _text(self) -> str:
        return bytes(self._head[:200]).decode(errors="replace")


def fault_of(error: BaseException, *, answered: bool = False) -> str:
    """The cause that a transport's exception names; `answered`: the reply had begun."""
    if out_of_descriptors(error):
        return "file_descriptors"
    names = [kind.__name__ for kind in type(error).__mro__]
    table = _TIMEOUTS | ({} if answered else _CONNECTING)
    known = next((table[name] for name in names if name in table), "")
    timeout = "read_timeout" if isinstance(error, TimeoutError) else ""
    return known or timeout or ("truncated" if answered else "connection")


def never_sent(error: BaseException) -> bool:
    """Whether a request failed before it had a connection."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return out_of_descriptors(error) or bool(names & _UNCONNECTED)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()


def _object(text: bytes | bytearray) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
