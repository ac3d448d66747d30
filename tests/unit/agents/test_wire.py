"""What came back on the wire decides what an episode is, whatever the agent returns."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.agent_checks.episode_source import episode_source
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.judge import ServerProbe, judge_run
from shakedown.agent_checks.runner import RunSettings, run_episodes
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.wire import ENGINE, TO_ENGINE, TO_PROXY, Sent, WireCall, WireOutcome, judged
from shakedown.config import GrpoConfig
from tests.unit.agents.wire_server import WireServer, wire_server

AGENTS = Path(__file__).parent / "swallowing_agents.py"
pytestmark = pytest.mark.slow  # the whole of an episode's time, for a server that hangs
PATHS = ("proxy", "relay")
Row = dict[str, Any]


def run(url: str, rows: list[Row], path: str, *, agent: str = "Swallows") -> RunResult:
    """These rows at once, through the recording proxy or the relay that changes nothing."""
    opened = episode_source(
        f"{AGENTS}:{agent}",
        AgentEndpoint(url, "None", "policy"),
        seconds=4.0,
        grpo=GrpoConfig(max_tokens=16) if path == "proxy" else None,
    )

    async def run_rows() -> RunResult:
        async with opened as source:
            return await run_episodes(source, [json.dumps(row) for row in rows], RunSettings())

    return asyncio.run(run_rows())


# name -> (row, cause on either path, words of its detail)
FAULTS: dict[str, tuple[Row, str, str]] = {
    "no call": ({}, "no_call", "it made none"),
    "404": ({"texts": ["status:404"]}, "api_status", "status 404: as asked"),
    "500 twice": ({"texts": ["status:500"] * 2}, "api_status", "none of its 2 calls"),
    "html": ({"texts": ["html"]}, "bad_reply", "text/html"),
    "nested": ({"texts": ["nested"]}, "bad_reply", "application/json"),
    "cut body": ({"texts": ["cut"]}, "truncated", ""),
    "cut stream": ({"texts": ["cut"], "by": "stream"}, "truncated", "broke off"),
    "reset": ({"texts": ["reset"]}, "connection", ""),
    "reset in a stream": ({"texts": ["gone"], "by": "stream"}, "truncated", ""),
    "hangs": ({"texts": ["hang"]}, "hanging", "for the server's reply"),
    "given up": ({"texts": ["hang"], "patience": 1.5}, "no_call", "left its 1 calls"),
    "left": ({"texts": ["slowly"], "by": "leaves"}, "no_call", "left its 1 calls"),
    "None": ({"texts": ["status:500"], "reward": None}, "api_status", "status 500"),
    "sync": ({"texts": ["status:500"], "by": "synchronous"}, "api_status", "status 500"),
    "aiohttp": ({"texts": ["status:500"], "by": "aiohttp"}, "api_status", "status 500"),
    "foreign id": ({"texts": ["x"], "foreign": True}, "bad_return", "'chatcmpl-of-nobody'"),
}
GOOD: dict[str, Row] = {
    "plain": {"texts": ["x"]},
    "stream": {"texts": ["x"], "by": "stream"},
    "synchronous": {"texts": ["x"], "by": "synchronous"},
    "aiohttp": {"texts": ["x"], "by": "aiohttp"},
    "keyed": {"texts": ["x", "longer"], "keyed": True},
    "borne": {"texts": ["status:500", "x", "html"]},
}


@pytest.fixture(scope="module", params=PATHS)
def seen(request: pytest.FixtureRequest) -> tuple[str, dict[str, Episode], RunResult]:
    """Every row of both tables at once: what one does must not cost another one."""
    rows = [row for row, _, _ in FAULTS.values()] + list(GOOD.values())
    with wire_server() as server:
        result = run(server.url, rows, request.param)
    names = [*FAULTS, *(f"good {name}" for name in GOOD)]
    return request.param, dict(zip(names, result.episodes, strict=True)), result


@pytest.mark.parametrize("name", FAULTS)
def test_an_episode_whose_calls_failed_is_none_though_run_returned_a_number(
    seen: tuple[str, dict[str, Episode], RunResult], name: str
) -> None:
    _, cause, words = FAULTS[name]
    episode = seen[1][name]

    assert (episode.cause, episode.reward) == (cause, None), episode
    assert words in episode.detail


@pytest.mark.parametrize("name", GOOD)
def test_an_episode_with_a_good_reply_is_good(
    seen: tuple[str, dict[str, Episode], RunResult], name: str
) -> None:
    episode = seen[1][f"good {name}"]

    assert episode.cause == "", episode
    assert episode.calls_made == len(GOOD[name]["texts"])


def test_calls_that_failed_in_good_episodes_are_counted_and_warned_of(
    seen: tuple[str, dict[str, Episode], RunResult],
) -> None:
    findings = judge_run(seen[2], ServerProbe())

    (warned,) = [each for each in findings if each.check == "failed_calls"]
    assert warned.status == "warn"
    assert str(warned.measured).startswith("2 of ")
    assert "in 1 episodes" in str(warned.measured)


def test_every_cause_has_a_remedy(
    seen: tuple[str, dict[str, Episode], RunResult],
) -> None:
    findings = judge_run(seen[2], ServerProbe(asked=True, reachable=True))

    failed = [each for each in findings if each.check.startswith("failed_")]
    assert {each.check for each in failed} > {"failed_truncated", "failed_hanging"}
    assert all(each.remedy for each in failed)
    subjects = {each.check: each.subject for each in failed}
    assert subjects["failed_truncated"] == subjects["failed_hanging"] == "server"
    assert subjects["failed_no_call"] == subjects["failed_bad_return"] == "agent"


@pytest.mark.parametrize(
    ("found", "by_agent"),
    [
        (WireOutcome("exception"), True),
        (WireOutcome("connection"), True),  # of a tool, say: no call of the model failed
        (WireOutcome("connection", hop=TO_ENGINE), False),
        (WireOutcome("api_status", status=400, hop=ENGINE), True),  # beyond the context
        (WireOutcome("api_status", status=404, hop=TO_PROXY), True),
        (WireOutcome("api_status", status=429, hop=ENGINE), False),
        (WireOutcome("api_status", status=500, hop=ENGINE), False),
        (WireOutcome("file_descriptors"), False),
        (WireOutcome(), False),
    ],
)
def test_whose_failure_it_is_goes_by_where_the_call_failed(
    found: WireOutcome, by_agent: bool
) -> None:
    assert found.by_agent is by_agent


def test_a_reply_that_the_agents_client_did_not_wait_for_is_the_engines() -> None:
    left = WireCall()
    left.leave()

    found = judged(WireOutcome("read_timeout", "no reply"), Sent([left]), 5.0)

    assert (found.cause, found.hop, found.by_agent) == ("read_timeout", ENGINE, False)


@pytest.mark.parametrize(
    ("lost", "open_for", "cause"),
    [(4.0, 4.0, "connection"), (0.1, 7.9, "hanging"), (1.0, 1.0, "episode_timeout")],
)
def test_a_call_that_is_open_counts_with_the_lost_one_before_it(
    lost: float, open_for: float, cause: str
) -> None:
    now = time.time()
    first, second = WireCall(began=now - open_for - lost), WireCall(began=now - open_for)
    first.end(0, "connection", hop=TO_ENGINE)
    first.ended = now - open_for

    found = judged(
        WireOutcome("episode_timeout", "no result after 8 s"), Sent([first, second]), 8.6
    )

    assert found.cause == cause


@pytest.fixture
def server() -> Iterator[WireServer]:
    with wire_server() as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
def test_an_error_of_the_agents_own_after_a_failed_call_is_told_by_the_call(
    server: WireServer, path: str
) -> None:
    rows: list[Row] = [{"texts": ["status:500"]}, {"texts": ["x"]}]

    after_a_fault, own = run(server.url, rows, path, agent="Wraps").episodes

    assert (after_a_fault.cause, after_a_fault.status) == ("api_status", 500)
    assert "could not be asked" in after_a_fault.detail
    assert own.cause == "exception"


def test_a_server_that_is_not_there_is_told_though_the_agent_says_nothing() -> None:
    with wire_server() as gone:
        pass
    for path in PATHS:
        (episode,) = run(gone.url, [{"texts": ["x"]}], path).episodes
        assert episode.cause == "connection", episode
        assert episode.answered == 0


def test_requests_that_no_episode_can_be_named_for_leave_the_agent_its_word(
    server: WireServer,
) -> None:
    (episode,) = run(server.url, [{"texts": ["x"], "by": "threads"}], "relay").episodes

    assert (episode.cause, episode.reward) == ("", 1.0)
    assert server.asked == ["x"]


@pytest.mark.parametrize("path", PATHS)
def test_an_agent_that_asks_another_server_has_made_no_call_and_its_address_is_told(
    server: WireServer, path: str
) -> None:
    with wire_server() as other:
        rows: list[Row] = [{"texts": ["x"], "url": other.url}]
        (episode,) = run(server.url, rows, path, agent="Elsewhere").episodes

    assert episode.cause == "no_call"
    place = other.url.removeprefix("http://").removesuffix("/v1")
    assert f"its requests went to other addresses than base_url: {place} (1)" in episode.detail


@pytest.mark.parametrize("path", PATHS)
def test_an_agent_that_asks_again_until_its_time_is_over_is_told_by_what_it_was_answered(
    server: WireServer, path: str
) -> None:
    refused, endless = ["status:429"] * 1_000, ["x"] * 100_000
    rows: list[Row] = [{"texts": refused, "pause": 0.1}, {"texts": endless, "pause": 0.1}]

    for_ever, loop = run(server.url, rows, path).episodes

    assert (for_ever.cause, for_ever.status) == ("api_status", 429), for_ever
    assert "calls were not answered well, the last one: status 429" in for_ever.detail
    assert loop.cause == "episode_timeout", loop
    assert re.search(r"; \d+ of its \d+ calls were answered", loop.detail)
