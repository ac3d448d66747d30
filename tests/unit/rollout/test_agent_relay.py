"""The relay before a server whose replies cannot be recorded passes all on unchanged."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from shakedown.agents.endpoint import HEADER
from shakedown.rollout.agent_relay import AgentRelay

Seen = list[web.Request]


@pytest.fixture
def seen() -> Seen:
    return []


@pytest.fixture
async def relay(seen: Seen) -> AsyncIterator[AgentRelay]:
    """Before a server that answers 207 with what it was sent, compressed."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        reply = web.Response(status=207, body=await request.read(), headers={"x-own": "kept"})
        reply.content_type = "application/json"
        reply.enable_compression(web.ContentCoding.gzip)
        return reply

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/deployments/a%20b"
    async with AgentRelay(url, "the real key", log_calls=True) as relay:
        yield relay
    await runner.cleanup()


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("Authorization", "Bearer {key}", "Bearer the real key"),
        ("x-api-key", "{key}", "the real key"),
        ("Authorization", "Bearer its own", "Bearer its own"),
    ],
)
async def test_a_request_and_its_reply_pass_with_the_servers_key_in_the_place_of_the_episodes(
    relay: AgentRelay, seen: Seen, name: str, value: str, sent: str
) -> None:
    key, url = relay.open()
    headers = {name: value.format(key=key), "x-more": "1", "Content-Type": "application/json"}
    body = b'{"id": "r1", "choices": [{"index": 0, "message": {"content": "4"}}]}'

    async with (
        aiohttp.ClientSession(headers=headers) as agent,
        agent.post(
            URL(f"{url}/chat/completions?api-version=2%2F3", encoded=True), data=body
        ) as reply,
    ):
        answer = await reply.read()

    (asked,) = seen
    assert asked.raw_path == "/deployments/a%20b/chat/completions?api-version=2%2F3"
    assert (asked.headers[name], asked.headers["x-more"], asked.headers[HEADER]) == (sent, "1", key)
    assert (reply.status, reply.headers["x-own"], answer) == (207, "kept", body)
    (call,), log = relay.wire_of(key), relay.log_of(key)
    assert (call.good, call.status, call.reply) == (True, 207, "r1")
    assert log is not None
    assert log.to_json()["calls"][0]["replies"] == [{"text": "4", "finish_reason": ""}]


async def test_a_call_of_no_episode_is_passed_on_too(relay: AgentRelay, seen: Seen) -> None:
    key, _ = relay.open()
    headers = {"Authorization": f"Bearer {relay.api_key}"}

    async with (
        aiohttp.ClientSession(headers=headers) as agent,
        agent.get(f"{relay.base_url}/models") as reply,
    ):
        status = reply.status

    assert (status, seen[0].headers["Authorization"]) == (207, "Bearer the real key")
    assert HEADER not in seen[0].headers
    assert relay.wire_of(key) == []
