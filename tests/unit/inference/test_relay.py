"""Several real servers behind one URL: one refuses, errs, hangs or breaks off."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from shakedown.cluster.nodes import free_port
from shakedown.core.errors import ServerError, UsageError
from shakedown.inference.client import Client
from shakedown.inference.engines import Request, get_token_engine
from shakedown.inference.relay import Servers, relayed, split_urls

STICKY = "x-episode"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Fake"

    def do_GET(self) -> None:
        self._wait()
        self._send(200, {"data": [{"id": "policy"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.seen.append((self.path, dict(self.headers), body))
        self._wait()
        time.sleep(self.server.seconds)
        if self.server.mode == "error":
            self._send(500, {"error": {"message": f"broken in {self.server.name}"}})
        elif self.server.mode == "stream":
            self._stream()
        else:
            self._send(200, {"by": self.server.name, "sent": json.loads(body)})

    def _wait(self) -> None:
        if self.server.mode == "hang":
            self.server.freed.wait(20.0)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.wfile.flush()
        self.close_connection = True  # in the middle of it

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        with contextlib.suppress(OSError):  # who asked is gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


class _Fake(ThreadingHTTPServer):
    """`mode`: good, error (500 to POST), hang (answers nothing), stream (breaks off)."""

    daemon_threads = True

    def __init__(self, name: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.name, self.mode, self.seconds = name, "good", 0.0
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.freed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def _running(name: str, port: int = 0) -> Iterator[_Fake]:
    fake = _Fake(name, port)
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield fake
    finally:
        fake.freed.set()
        fake.shutdown()
        fake.server_close()
        thread.join()


@pytest.fixture
def fakes() -> Iterator[tuple[_Fake, _Fake]]:
    with _running("one") as one, _running("two") as two:
        yield one, two


@contextlib.contextmanager
def _relay(*urls: str) -> Iterator[Servers]:
    with relayed(",".join(urls), "key", sticky=STICKY, every=0.1, patience=0.5) as servers:
        yield servers


def _post(
    servers: Servers, number: int = 0, headers: dict[str, str] | None = None
) -> httpx.Response:
    return httpx.post(f"{servers.url}/v1/c?x=1", json={"n": number}, headers=headers, timeout=30.0)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_single_server_is_asked_itself() -> None:
    with relayed("http://127.0.0.1:1/v1") as servers:
        assert servers.url == "http://127.0.0.1:1/v1"
        assert servers.findings() == []


def test_requests_are_handed_on_whole_and_spread_by_load(fakes: tuple[_Fake, _Fake]) -> None:
    with _relay(fakes[0].url + "/v1", fakes[1].url) as servers:
        for fake in fakes:
            fake.seconds = 0.3
        with ThreadPoolExecutor(8) as pool:
            replies = list(
                pool.map(lambda n: _post(servers, n, {"Authorization": "Bearer k"}), range(8))
            )

    assert [reply.json()["sent"]["n"] for reply in replies] == list(range(8))
    assert [len(fake.seen) for fake in fakes] == [4, 4]
    path, headers, _ = fakes[0].seen[0]
    assert (path, headers["Authorization"]) == ("/v1/c?x=1", "Bearer k")
    assert [(f.status, f.measured) for f in servers.findings()] == [
        ("pass", "4 requests answered")
    ] * 2


def test_an_episode_stays_with_its_server(fakes: tuple[_Fake, _Fake]) -> None:
    with _relay(*(fake.url for fake in fakes)) as servers:
        turns = [
            [_post(servers, headers={STICKY: key}).json()["by"] for key in "abcd"] for _ in range(3)
        ]

    assert turns[0] == turns[1] == turns[2]
    assert sorted(turns[0]) == ["one", "one", "two", "two"]


def test_a_server_that_refuses_is_put_aside_and_its_requests_go_to_the_other() -> None:
    port = free_port()
    with _running("good") as good, _relay(f"http://127.0.0.1:{port}", good.url) as servers:
        answered = [_post(servers).json()["by"] for _ in range(3)]
        dead, alive = servers.findings()
        with _running("again", port):
            assert servers.relay is not None
            _until(lambda: not servers.findings()[0].measured.count("still aside"))
            back = servers.findings()[0]
            later = {_post(servers).json()["by"] for _ in range(4)}

    assert answered == ["good"] * 3
    assert (dead.check, dead.status, dead.subject) == (
        "server", "warn", f"http://127.0.0.1:{port}",
    )  # fmt: skip
    assert "Connect" in dead.measured
    assert "1 requests went to another server, 0 were answered; still aside" in dead.measured
    assert alive.status == "pass"
    assert back.status == "warn"
    assert back.measured.endswith("back in use")
    assert "again" in later


def test_a_request_in_flight_on_a_server_that_stops_answering_is_asked_again(
    fakes: tuple[_Fake, _Fake],
) -> None:
    one, two = fakes
    with _relay(one.url, two.url) as servers:
        one.mode = "hang"
        replies = [_post(servers, n) for n in range(2)]
        findings = servers.findings()

    assert [reply.json()["by"] for reply in replies] == ["two", "two"]
    assert "no answer within 0.5 s" in findings[0].measured


def test_a_server_that_errs_where_another_does_not_is_put_aside(
    fakes: tuple[_Fake, _Fake],
) -> None:
    one, two = fakes
    one.mode = "error"
    with _relay(one.url, two.url) as servers:
        reply = _post(servers)
        findings = servers.findings()

    assert reply.json()["by"] == "two"
    assert "HTTP 500" in findings[0].measured
    assert findings[1].status == "pass"


def test_an_error_of_every_server_is_the_requests_own(fakes: tuple[_Fake, _Fake]) -> None:
    for fake in fakes:
        fake.mode = "error"
    with _relay(*(fake.url for fake in fakes)) as servers:
        reply = _post(servers)
        findings = servers.findings()

    assert reply.status_code == 500
    assert "broken in" in reply.json()["error"]["message"]
    assert [found.status for found in findings] == ["pass", "pass"]


def test_a_stream_that_has_begun_is_not_asked_again(fakes: tuple[_Fake, _Fake]) -> None:
    one, two = fakes
    one.mode = two.mode = "stream"
    with _relay(one.url, two.url) as servers, pytest.raises(httpx.RemoteProtocolError):
        _post(servers)

    assert len(one.seen) + len(two.seen) == 1


def test_without_any_server_it_is_as_with_one_that_is_gone() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]

    async def ask(url: str) -> None:
        async with Client(get_token_engine("vllm"), url, "policy", timeout=20.0) as client:
            await client.send(Request("/v1/models", method="GET"))

    with (
        pytest.raises(ServerError, match="none of the 2 servers answers") as raised,
        _relay(*urls) as servers,
    ):
        asyncio.run(ask(servers.url))

    assert all(url in str(raised.value) for url in urls)


def test_another_error_is_left_as_it_is(fakes: tuple[_Fake, _Fake]) -> None:
    with pytest.raises(ServerError, match="its own"), _relay(*(fake.url for fake in fakes)):
        raise ServerError("its own")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://a:1,b:2", "'b:2' is not a valid URL"),
        ("http://a:1,", "'' is not a valid URL"),
        ("http://a:1,http://a:1/v1/", "'http://a:1' is listed twice"),
    ],
)
def test_what_is_no_list_of_urls_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match="expected http://HOST:PORT") as raised:
        split_urls(text)

    assert told in str(raised.value)
