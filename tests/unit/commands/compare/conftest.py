"""A model, the server that takes its numbers from it, and rows."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shakedown.consistency.score import Reference
from shakedown.training.demo import write_model
from tests.unit.commands.compare.engine import ROWS, Engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Engine]:
    engine = Engine(Reference(str(model), dtype="float32"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def answer(self, body: dict[str, Any]) -> None:
            status, reply = engine.reply(self.path, body)
            if "dies" in engine.plant and engine.seen > 13:
                self.close_connection = True  # without a word, as a process that was killed
                return
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Quiet."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # Python's 5 make a client of many connections wait for seconds

    listening = Server(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    engine.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield engine
    listening.shutdown()
    listening.server_close()
    thread.join()


@pytest.fixture
def engine(server: Engine) -> Engine:
    server.plant, server.owner, server.seen = set(), "vllm", 0
    return server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path
