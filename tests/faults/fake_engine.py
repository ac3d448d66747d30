"""A real local server that stands in for an engine: `python fake_engine.py MODE [engine's argv]`.

Speaks the health check and completions of vLLM and SGLang's documented /generate. Modes: `good`,
`silent` (accepts, never answers), `crash` (prints what an engine prints and exits), `refuse`
(does not know the model), `stubborn` (ignores SIGTERM), `deaf` (that, and `silent`), `open` (does
not ask for its secret), `plain` (completions alone, without token ids). Starts a child as engines
do.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shakedown.inference.auth import read_secret

LOGPROB = -0.5
_SILENT = ("silent", "deaf")


class Handler(BaseHTTPRequestHandler):
    """One request; the mode stands on the server."""

    protocol_version = "HTTP/1.1"
    server: "Engine"

    def parse_request(self) -> bool:
        """As uvicorn's application would be guarded (`shakedown.inference.auth`)."""
        secret = self.server.secret
        known = super().parse_request()
        if known and secret and self.headers.get("Authorization") != f"Bearer {secret}":
            self.send_error(401)
            return False
        return known

    def do_GET(self) -> None:
        if self.server.mode in _SILENT:
            time.sleep(3600)
        if self.path == "/metrics":
            self._send(200, metrics(len(self.server.seen)).encode())
            return
        models = {"data": [{"id": "policy"}]} if self.path == "/v1/models" else {}
        self._answer(200, models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self.server.seen.append((self.path, body))
        if self.server.mode in _SILENT:
            time.sleep(3600)
        if self.server.mode == "refuse":
            self._answer(404, {"error": {"message": f"The model {body['model']} does not exist."}})
        elif self.path == "/generate" and self.server.mode == "plain":
            self._answer(404, {"error": "Not Found"})
        elif self.path == "/generate":
            self._answer(200, sglang_reply(body))
        elif self.path == "/update_weights_from_disk":
            good = not body["model_path"].endswith("/broken")
            self._answer(200 if good else 400, {"success": good, "message": "no such weights"})
        else:
            self._answer(200, {"choices": [{"text": "1"}]})

    def _answer(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


class Engine(ThreadingHTTPServer):
    """`seen`: (path, body) of every POST. `secret`: what requests must carry; empty: nothing."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, mode: str = "good", secret: str = "") -> None:
        super().__init__((host, port), Handler)
        self.secret = secret
        self.mode, self.seen = mode, list[tuple[str, dict[str, Any]]]()
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def server_close(self) -> None:
        """With its connections, as a process that ends."""
        super().server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # closed by the client
                connection.shutdown(socket.SHUT_RDWR)


def metrics(answered: int) -> str:
    """As vLLM writes them: one line for each way in which a request ends."""
    labels = 'engine="0",model_name="policy"'
    ways = (("stop", 0), ("length", answered), ("abort", 0))
    ended = [
        f'vllm:request_success_total{{{labels},finished_reason="{way}"}} {count}.0'
        for way, count in ways
    ]
    running = f"vllm:num_requests_running{{{labels}}} 0.0"
    return "\n".join(["# TYPE vllm:request_success_total counter", *ended, running, ""])


def sglang_reply(body: dict[str, Any]) -> Any:
    """What SGLang documents for /generate: every token as [logprob, id, text]."""
    sampling = body["sampling_params"]
    sampled = [[LOGPROB, 7 + place, None] for place in range(sampling["max_new_tokens"])]
    meta: dict[str, Any] = {
        "output_token_logprobs": sampled,
        "finish_reason": {"type": "length", "length": len(sampled)},
        "cached_tokens": 0,
    }
    if body.get("logprob_start_len") == 0:
        tokens = body["input_ids"]
        known = [[-float(token), token, None] for token in tokens[1:]]
        meta["input_token_logprobs"] = [[None, tokens[0], None], *known]
    replies = [{"text": "x", "meta_info": meta} for _ in range(sampling.get("n", 1))]
    return replies if len(replies) > 1 else replies[0]


def own_secret() -> str:
    """What the command that this process was started by says, as `shakedown.inference.auth`."""
    place = sys.orig_argv.index("shakedown.inference.auth")
    return read_secret(Path(sys.orig_argv[place + 1]))


def main() -> None:
    mode, arguments = sys.argv[1], sys.argv[2:]
    port = int(arguments[arguments.index("--port") + 1])
    if mode == "crash":
        sys.exit(
            "RuntimeError: Engine core initialization failed\ntorch.OutOfMemoryError: out of memory"
        )
    if mode in ("stubborn", "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    secret = "" if mode == "open" else own_secret()
    Engine("127.0.0.1", port, mode, secret).serve_forever()


if __name__ == "__main__":
    main()
