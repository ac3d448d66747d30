"""Each episode is written with its calls: as the proxy or the relay saw them."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.agent_checks.checks import (
    CheckPlan,
    CheckSettings,
    check_metrics,
    run_checks,
)
from shakedown.agent_checks.episode_source import episode_source
from shakedown.agent_checks.results import EpisodeWriter
from shakedown.agent_checks.runner import RunSettings, run_episodes
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.episode_lines import EpisodeLines, read_episodes
from shakedown.config import GrpoConfig
from tests.unit.rollout.chat_engine import ARGUMENTS, ChatEngine, chatting

TARGET = f"{Path(__file__).parents[1]}/rollout/agent_kinds.py:Kinds"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Line = dict[str, Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[ChatEngine]:
    with chatting() as engine:
        yield engine


def asks(content: str, **more: Any) -> dict[str, Any]:
    return {"kind": "asks", "content": content, "more": more}


def record(
    engine: ChatEngine, path: Path, *rows: dict[str, Any], proxy: bool = True, **settings: Any
) -> list[Line]:
    """The lines of these rows, by row and member."""
    opened = episode_source(
        TARGET,
        AgentEndpoint(f"{engine.url}/v1", "a long secret key", "policy"),
        seconds=20.0,
        grpo=GrpoConfig(max_tokens=16) if proxy else None,
    )

    async def run_rows() -> None:
        async with opened as source:
            with EpisodeLines(path) as lines:
                on_end = functools.partial(EpisodeWriter(lines, 5, len(rows)).add, "run")
                texts = [json.dumps(row) for row in rows]
                await run_episodes(source, texts, RunSettings(on_end=on_end, **settings))

    asyncio.run(run_rows())
    return sorted(read_episodes(path), key=lambda line: (line["row"], line["member"]))


@pytest.fixture(scope="module")
def seen(engine: ChatEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Line]:
    """What the proxy saw of episodes of every kind."""
    kinds = ("two_turns", "streams", "responses_turns", "messages_turns", "choices", "raises")
    rows = [{"kind": kind} for kind in (*kinds, "elsewhere")]
    rows += [asks("tool", tools=[TOOL]), asks("tool s", tools=[TOOL], stream=True)]
    rows += [asks("too long"), asks("no ids"), asks("broken off", stream=True)]
    names = [*kinds, "elsewhere", "tool", "tool s", "too long", "no ids", "broken off"]
    path = tmp_path_factory.mktemp("seen") / "episodes.jsonl"
    return dict(zip(names, record(engine, path, *rows), strict=True))


def test_a_line_names_its_row_and_what_came_of_it(seen: dict[str, Line]) -> None:
    good, bad = seen["two_turns"], seen["raises"]

    assert (good["check"], good["row"], good["member"]) == ("run", 5, 0)
    assert (good["reward"], good["cause"]) == ({"chatcmpl-4": 4.0, "chatcmpl-12": 0.0}, "")
    assert good["seconds"] > 0
    assert (bad["row"], bad["reward"], bad["cause"]) == (10, None, "exception")
    assert 'raise ValueError("never works")' in bad["trace"]
    assert bad["calls"] == []


def test_both_turns_are_told_with_their_replies_and_tokens(seen: dict[str, Line]) -> None:
    first, second = seen["two_turns"]["calls"]

    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert first["replies"] == [{"text": "<4>", "finish_reason": "stop"}]
    assert (first["protocol"], first["status"], first["error"]) == ("chat/completions", 200, "")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (4, 4)
    assert first["request_id"] == "chatcmpl-4"
    assert first["seconds"] > 0
    assert (second["repeats"], [m["content"] for m in second["messages"]]) == (1, ["<4>", "and?"])


def test_a_reply_is_the_same_streamed_or_not(seen: dict[str, Line]) -> None:
    (streamed,) = seen["streams"]["calls"]
    whole, parts = seen["tool"]["calls"][0], seen["tool s"]["calls"][0]

    assert streamed["replies"] == [{"text": "<7>", "finish_reason": "stop"}]
    assert (streamed["completion_tokens"], streamed["request_id"]) == (4, "chatcmpl-s")
    calls = [{"name": "add", "arguments": ARGUMENTS}]
    assert whole["replies"] == [{"text": "", "tool_calls": calls, "finish_reason": "tool_calls"}]
    assert parts["replies"] == whole["replies"]


@pytest.mark.parametrize("protocol", ["responses", "messages"])
def test_other_protocols_are_told_in_the_same_form(seen: dict[str, Line], protocol: str) -> None:
    first, second = seen[f"{protocol}_turns"]["calls"]

    assert first["protocol"] == second["protocol"] == protocol
    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert first["replies"] == [{"text": "<4>", "finish_reason": "stop"}]
    assert second["repeats"] == 1


def test_every_choice_is_a_reply(seen: dict[str, Line]) -> None:
    first = seen["choices"]["calls"][0]

    assert [reply["text"] for reply in first["replies"]] == ["<5>", "<5>"]
    assert first["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("too long", 400, "maximum context length"),
        ("no ids", 502, "not recorded"),
        ("elsewhere", 404, "an agent can only POST"),
        ("broken off", 502, "the engine's stream broke off"),
    ],
)
def test_a_call_that_failed_tells_what_the_agent_was_told(
    seen: dict[str, Line], name: str, status: int, words: str
) -> None:
    call = seen[name]["calls"][0]

    assert seen[name]["cause"]
    assert call["status"] == status
    assert words in call["error"]


def test_what_came_before_a_stream_broke_off_is_kept(seen: dict[str, Line]) -> None:
    call = seen["broken off"]["calls"][0]

    assert call["replies"] == [{"text": "<", "finish_reason": ""}]
    assert call["completion_tokens"] is None


def test_what_is_passed_on_unchanged_is_told_with_its_replies(
    engine: ChatEngine, tmp_path: Path
) -> None:
    rows = ({"kind": "two_turns"}, {"kind": "synchronous"}, asks("too long"))

    good, synchronous, bad = record(engine, tmp_path / "e.jsonl", *rows, proxy=False, group_size=1)

    assert {good["calls_seen_by"], bad["calls_seen_by"]} == {"relay"}
    first, second = good["calls"]
    assert first["protocol"] == "chat/completions"
    assert first["messages"] == [{"role": "user", "content": "one"}]
    assert first["replies"] == [{"text": "<4>", "finish_reason": "stop"}]
    assert first["completion_tokens"] is None
    assert (first["status"], second["repeats"]) == (200, 1)
    assert len(synchronous["calls"]) == 1
    assert [call["status"] for call in bad["calls"]] == [400]


def test_no_key_is_written(engine: ChatEngine, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    record(engine, path, {"kind": "two_turns"}, {"kind": "elsewhere"}, proxy=False)

    assert "a long secret key" not in path.read_text(encoding="utf-8")


def test_every_check_writes_its_episodes_and_names_rows_that_are_used_again(
    engine: ChatEngine, tmp_path: Path
) -> None:
    path, data = tmp_path / "episodes.jsonl", [json.dumps({"kind": "single"})] * 3
    with EpisodeLines(path) as lines:
        plan = CheckPlan(
            TARGET,
            data,
            AgentEndpoint(f"{engine.url}/v1", "key", "policy"),
            CheckSettings(prompts=4, group_size=2, episode_timeout=20.0),
            GrpoConfig(max_tokens=16),
            on_end=EpisodeWriter(lines, 0, len(data)).add,
        )
        checks = asyncio.run(run_checks(plan))

    found = list(read_episodes(path))
    numbers = check_metrics(checks)
    assert all(check.passed for check in checks)
    tokens = numbers["concurrent_tokens_per_second"] * numbers["concurrent_seconds"]
    assert tokens == pytest.approx(8 * len("<7>."), rel=1e-3)
    good = numbers["concurrent_good_episodes_per_second"] * numbers["concurrent_seconds"]
    assert good == pytest.approx(8, rel=1e-3)
    assert [line["check"] for line in found].count("concurrent") == 8
    assert {line["row"] for line in found if line["group"] == 3} == {0}
    (purpose,) = [line for line in found if line["on_purpose"]]
    assert (purpose["check"], purpose["index"], purpose["calls"]) == ("grouped", 0, [])
    assert {line["calls_seen_by"] for line in found} == {"proxy", ""}


@pytest.mark.slow
def test_a_run_that_is_killed_has_every_episode_that_had_ended(
    engine: ChatEngine, tmp_path: Path
) -> None:
    data, never = tmp_path / "rows.jsonl", tmp_path / "never"
    rows = [{"kind": "single"}, {"kind": "single"}, {"kind": "waits", "flag": str(never)}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = [sys.executable, "-m", "shakedown.cli", "agent", "run", TARGET, "--data", str(data)]
    argv += ["--base-url", engine.url, "--out", str(tmp_path)]
    old = [tmp_path / "verdict.json", tmp_path / "episodes.html"]
    for file in old:
        file.write_text("of an older run", encoding="utf-8")
    running = subprocess.Popen(argv, env=os.environ | {"OPENAI_API_KEY": "key"})
    path = tmp_path / "episodes.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        assert running.poll() is None
        time.sleep(0.05)

    running.send_signal(signal.SIGKILL)
    running.wait()

    assert [line["row"] for line in read_episodes(path)] in ([0, 1], [1, 0])
    assert not any(file.exists() for file in old)
