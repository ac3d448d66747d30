"""The client against real local sockets: SGLang's documented protocol, and bad servers."""

import asyncio
import socket
import threading

import pytest

from shakedown.core.errors import ServerError
from shakedown.inference.client import Client
from shakedown.inference.engines import get_token_engine
from tests.faults.fake_engine import LOGPROB, Engine
from tests.unit.local_engine import running


def url(engine: Engine) -> str:
    return f"http://127.0.0.1:{engine.server_address[1]}"


def sglang(engine: Engine, *, timeout: float = 30.0) -> Client:
    return Client(get_token_engine("sglang"), url(engine), "policy", timeout=timeout)


async def test_sglang_generation_carries_tokens_and_logprobs() -> None:
    with running() as engine:
        async with sglang(engine) as client:
            found = await client.generate([1, 2, 3], max_tokens=4, temperature=0.7, samples=2)

    path, body = engine.seen[0]
    assert path == "/generate"
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"]["temperature"] == 0.7
    assert [c.tokens for c in found] == [[7, 8, 9, 10]] * 2
    assert found[0].logprobs == [LOGPROB] * 4
    assert found[0].finish == "length"


async def test_sglang_scores_are_of_the_completion_alone() -> None:
    with running() as engine:
        async with sglang(engine) as client:
            found = await client.score([1, 2, 3], [4, 5])

    assert found == [-4.0, -5.0]


async def test_sglang_loads_weights_and_flushes_its_cache() -> None:
    with running() as engine:
        async with sglang(engine) as client:
            await client.update_weights("/weights/v1")

    assert engine.seen == [
        ("/update_weights_from_disk", {"model_path": "/weights/v1", "flush_cache": True})
    ]


async def test_sglang_that_refuses_weights_is_an_error() -> None:
    with running() as engine:
        async with sglang(engine) as client:
            with pytest.raises(ServerError, match="no such weights"):
                await client.update_weights("/broken")


async def test_five_hundred_requests_at_once_are_all_answered() -> None:
    with running() as engine:
        async with sglang(engine) as client:
            calls = [client.generate([1], max_tokens=1) for _ in range(500)]
            found = await asyncio.gather(*calls)

    assert len(found) == 500


async def test_server_that_never_answers_ends_in_a_clear_error() -> None:
    # Accepts in the backlog, reads nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Client(get_token_engine("sglang"), address, "policy", timeout=0.5) as client:
            with pytest.raises(ServerError, match=r"no answer within 0\.5 s"):
                await client.generate([1], max_tokens=1)
            assert await client.health(within=0.2)


async def test_server_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shakedown.inference.client.PAUSES", (0.01,))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"

    async with Client(get_token_engine("sglang"), address, "policy") as client:
        with pytest.raises(ServerError, match=f"{address}/generate: ClientConnectorError"):
            await client.generate([1], max_tokens=1)


async def test_connection_that_is_dropped_once_is_tried_again() -> None:
    dropped = threading.Event()

    class Dropping(Engine):
        def verify_request(self, *_: object) -> bool:
            first = not dropped.is_set()
            dropped.set()
            return not first

    engine = Dropping("127.0.0.1", 0)
    thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        async with sglang(engine) as client:
            found = await client.generate([1], max_tokens=1)
    finally:
        engine.shutdown()
        engine.server_close()
        thread.join()

    assert dropped.is_set()
    assert len(found) == 1


async def test_error_status_is_told_in_the_servers_words() -> None:
    with running("refuse") as engine:
        async with Client(get_token_engine("vllm"), url(engine), "other") as client:
            with pytest.raises(ServerError, match="HTTP 404 The model other does not exist"):
                await client.generate([1], max_tokens=1)


async def test_reply_without_logprobs_is_refused() -> None:
    with running() as engine:
        async with Client(get_token_engine("vllm"), url(engine), "policy") as client:
            with pytest.raises(ServerError, match="without token ids and logprobs"):
                await client.generate([1], max_tokens=1)


async def test_healthy_server_has_no_fault() -> None:
    with running() as engine:
        async with sglang(engine) as client:
            assert await client.health() == ""
