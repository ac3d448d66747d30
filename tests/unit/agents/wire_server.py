"""A local server whose replies fail on the wire as the last message says.

`good`, `talk...` (says that and more), `status:N`, `html`, `cut` (a body without its end), `reset`,
`hang`; with `stream` in the body also `cut` (closed in the middle), `gone` (reset there) and
`slowly` (waits there). Good replies have token ids if `ids`. `die()` ends it as a crash does: the
port refuses from then on. `once`: a connection is closed by its second call; `models`: the
status of the list of models; `not_taken`: parameters that are refused.
"""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from tests.unit.rollout.chat_engine import chat, chunks, prompt_ids

_TALK = "the quick brown fox jumps over the lazy dog, and then it goes home for supper"
_NO_REPLIES = {
    "html": ("text/html", b"<html><body>please log in</body></html>"),
    "nested": ("application/json", b'{"a":' * 50_000),
}
# What tells a client what kind of server it is.
_LOOKED_AT: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "policy", "max_model_len": 200}]},
    "/v1/completions": {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]},
}


class WireServer:
    """`asked`: contents of the last messages, in order; `dies_after`, `hangs_after`: so many calls.

    `hung`: of these.
    """

    def __init__(
        self,
        *,
        ids: bool = True,
        dies_after: int = 0,
        once: bool = False,
        models: int = 200,
        not_taken: tuple[str, ...] = (),
    ) -> None:
        self.once, self.models, self.not_taken = once, models, not_taken
        self.bodies: list[dict[str, Any]] = []
        self.ids, self.dies_after, self.hung = ids, dies_after, 0
        self.hangs_after: int | None = None
        self.asked: list[str] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()

    def die(self) -> None:
        """Reset every connection and refuse new ones."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for each in self._open:
                _reset(each)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        calls = 0
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            while head := lines.readline():
                calls += 1
                length = 0
                while (line := lines.readline()).strip():
                    name, _, value = line.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = lines.read(length)
                if self.once and calls > 1:
                    _reset(connection)
                    break
                if not self._answer(connection, head.split()[1].decode(), body):
                    break
        with self._lock:
            self._open.discard(connection)
        # Also where the file above still counts as a user of the socket, as after a reset.
        if (descriptor := connection.detach()) >= 0:
            os.close(descriptor)

    def _answer(self, connection: socket.socket, path: str, content: bytes) -> bool:
        if not path.endswith("/chat/completions"):
            found = _LOOKED_AT.get(path) if self.models == 200 else {"error": {"message": "no"}}
            return _send(connection, self.models if found else 404, found or {})
        body = json.loads(content)
        self.bodies.append(body)
        wish, _, detail = str(body["messages"][-1]["content"]).partition(":")
        with self._lock:
            self.asked.append(wish)
            dies = self.dies_after and len(self.asked) > self.dies_after
            if self.hangs_after is not None and len(self.asked) > self.hangs_after:
                wish, self.hung = "hang", self.hung + 1
        if dies:
            self.die()
            return False
        if wish == "status":
            return _send(connection, int(detail), {"error": {"message": "as asked"}})
        if wish in ("hang", "reset"):
            if wish == "hang":
                connection.recv(1)  # until the client goes away
            else:
                _reset(connection)
            return False
        if wish in _NO_REPLIES:
            return _raw(connection, 200, *_NO_REPLIES[wish])
        return self._chat(connection, body, wish)

    def _chat(self, connection: socket.socket, body: dict[str, Any], wish: str) -> bool:
        if refused := [name for name in self.not_taken if name in body]:
            told = {"error": {"message": f"Extra inputs are not permitted: {refused[0]}"}}
            return _send(connection, 400, told)
        prompt = prompt_ids(body["messages"])
        if body.get("stream"):
            events = [f"data: {json.dumps(each)}\n\n".encode() for each in chunks(body, prompt)]
            kind = b"content-type: text/event-stream\r\nconnection: close\r\n\r\n"
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + kind)
            bad = wish in ("cut", "gone", "slowly")
            shown = events[:2] if bad else [*events, b"data: [DONE]\n\n"]
            connection.sendall(b"".join(shown))
            if wish == "slowly":
                connection.recv(1)  # until the client goes away
            elif wish == "gone":
                _reset(connection)
            else:
                connection.shutdown(socket.SHUT_RDWR)
            return False
        reply = chat(body, prompt)
        if wish.startswith("talk"):
            said = f"{wish}: {_TALK}"
            reply["choices"][0]["message"]["content"] = said
        if not self.ids:
            del reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
        return _send(connection, 200, reply, missing=wish == "cut")


def _send(connection: socket.socket, status: int, body: object, *, missing: bool = False) -> bool:
    data = json.dumps(body).encode()
    return _raw(connection, status, "application/json", data, missing=missing)


def _raw(
    connection: socket.socket, status: int, kind: str, data: bytes, *, missing: bool = False
) -> bool:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + (data[: len(data) // 2] if missing else data))
    if missing:
        connection.shutdown(socket.SHUT_RDWR)
    return not missing


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Linger of 0 s: closing sends RST.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


@contextlib.contextmanager
def wire_server(**settings: Any) -> Iterator[WireServer]:
    """Run one for as long as a test needs it."""
    server = WireServer(**settings)
    try:
        yield server
    finally:
        server.die()
