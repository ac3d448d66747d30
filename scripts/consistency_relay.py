"""A relay before an inference server that spoils what passes: a proxy in trouble."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

# Takes the number of the answer to a POST, from 1, and the parsed answer; changes it in place.
Spoil = Callable[[int, Any], None]
_HEADERS = ("authorization", "content-type")


def logprobs_of(reply: Any) -> list[dict[str, Any]]:
    """The rows of a chat answer that have a `logprob`; empty for any other answer."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    content = (choices[0].get("logprobs") or {}).get("content") if choices else None
    return list(content or [])


@contextmanager
def relayed(url: str, spoil: Spoil) -> Iterator[str]:
    """The relay's own URL, on a free local port, for as long as the block runs."""
    lock = threading.Lock()
    seen = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._relay(None)

        def do_POST(self) -> None:
            self._relay(self.rfile.read(int(self.headers["Content-Length"])))

        def _relay(self, body: bytes | None) -> None:
            nonlocal seen
            headers = {k: v for k, v in self.headers.items() if k.lower() in _HEADERS}
            method = "GET" if body is None else "POST"
            answer = client.request(method, url + self.path, content=body, headers=headers)
            status, text = answer.status_code, answer.content
            if body is not None and status == httpx.codes.OK:
                reply = json.loads(text)
                with lock:
                    seen += 1
                    spoil(seen, reply)
                text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            """Nothing is logged."""

    with (
        httpx.Client(timeout=300, trust_env=False) as client,
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
