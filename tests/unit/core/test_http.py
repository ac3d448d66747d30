"""HTTP against real local servers: limits of time and size, proxies, and servers in a thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from shakedown.core.http import (
    LOOPBACK,
    Handler,
    NoAnswerError,
    application,
    fetch,
    in_thread,
    listening,
)


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    with (
        socket.create_server((LOOPBACK, 0)) as bound,
        in_thread(listening(application(handler), bound)) as port,
    ):
        yield f"http://{LOOPBACK}:{port}"


async def echo(request: web.Request) -> web.Response:
    seen = {"url": str(request.url), "key": request.headers.get("Authorization", "")}
    return web.json_response({**seen, "body": await request.text()}, status=203)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 4096)
        await asyncio.sleep(0.01 if "slow" in request.path else 0)


async def elsewhere(_request: web.Request) -> web.Response:
    raise web.HTTPFound("http://192.0.2.1/")


def test_an_answer_comes_whole_with_status_and_kind() -> None:
    with serving(echo) as url:
        answer = fetch("POST", f"{url}/a?b=1", seconds=10.0, data=b"sent")

    assert (answer.status, answer.kind) == (203, "application/json")
    assert '"body": "sent"' in answer.text
    assert "/a?b=1" in answer.text


def test_an_endless_answer_is_none() -> None:
    with serving(endless) as url:
        with pytest.raises(NoAnswerError, match="more than 10000 bytes"):
            fetch("GET", url, seconds=20.0, largest=10_000)
        assert fetch("GET", url, seconds=20.0, largest=0).status == 200

        began = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"/slow: no answer within 0\.5 s") as raised:
            fetch("GET", f"{url}/slow", seconds=0.5)
    assert raised.value.timed_out
    assert time.monotonic() - began < 5.0


def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    with serving(elsewhere) as url:
        assert fetch("GET", url, seconds=10.0).status == 302


def test_who_does_not_listen_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        url = f"http://{LOOPBACK}:{closed.getsockname()[1]}"
    with pytest.raises(NoAnswerError, match=f"{url}: ClientConnectorError") as raised:
        fetch("GET", url, seconds=10.0)

    assert raised.value.unconnected
    assert not raised.value.timed_out
    for wrong in ("no address", "http://[::1", "http://"):
        with pytest.raises(NoAnswerError):
            fetch("GET", wrong, seconds=1.0)


def test_the_environments_proxy_is_asked_only_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text(f"machine {LOOPBACK} login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(echo) as proxy, serving(echo) as url:
        monkeypatch.setenv("http_proxy", proxy.removeprefix("http://"))
        own = fetch("GET", url, seconds=10.0).text
        foreign = fetch("GET", "http://no.such.host/x", seconds=10.0, by_proxy=True).text
        monkeypatch.setenv("no_proxy", LOOPBACK)
        spared = fetch("GET", f"{url}/y", seconds=10.0, by_proxy=True).text

    assert f'"url": "{url}/"' in own
    assert "http://no.such.host/x" in foreign
    assert f'"url": "{url}/y"' in spared
    assert all('"key": ""' in answer for answer in (own, foreign, spared))


def test_a_block_in_a_thread_ends_with_it_and_hands_its_errors_on() -> None:
    before = threading.active_count()
    with serving(echo) as url:
        assert threading.active_count() > before
    with pytest.raises(NoAnswerError):
        fetch("GET", url, seconds=10.0)
    assert threading.active_count() == before

    with socket.create_server((LOOPBACK, 0)) as bound:
        bound.close()
        with pytest.raises(OSError), in_thread(listening(application(echo), bound)):
            pass
