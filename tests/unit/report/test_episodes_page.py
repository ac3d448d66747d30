"""The page of an agent's conversations: which are shown, and that nothing in them can act."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import AgentsPaths, RunPaths
from shakedown.core.verdict import Verdict
from shakedown.report.episodes_page import MOST_FAILED, MOST_GOOD, choose, render, write_page
from shakedown.report.episodes_view import LONGEST_TEXT, episode_view

EVIL = "</div><script>alert(1)</script><img src=x onerror=alert(1)>\u202e"


def line(row: int, cause: str = "", **more: Any) -> dict[str, Any]:
    episode: dict[str, Any] = {"check": "run", "row": row, "member": 0, "cause": cause}
    return episode | {"reward": None if cause else 1.0, "seconds": 0.5, "calls": []} | more


def call(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "one"}]
    replies = [{"text": "<4>", "finish_reason": "stop"}]
    told = {"protocol": "chat/completions", "messages": messages, "replies": replies}
    return told | {"status": 200, "error": "", "repeats": 0} | more


def verdict(**more: Any) -> Verdict:
    return Verdict(stage="agents", status="FAIL", summary="1 of 2 episodes failed", **more)


def test_failed_episodes_of_every_cause_come_before_a_sample_of_good_ones() -> None:
    lines = [line(n) for n in range(500)] + [line(n, "exception") for n in range(300)]
    lines += [line(7, "exit"), line(8, "exception", on_purpose=True)]

    chosen = choose(enumerate(lines, 1))

    assert chosen.causes == {"": 500, "exception": 300, "exit": 1}
    assert (chosen.total, chosen.on_purpose) == (802, 1)
    assert {e.cause for e in chosen.failed} == {"exception", "exit"}
    assert len(chosen.failed) <= MOST_FAILED
    assert len({e.line for e in chosen.good}) == MOST_GOOD
    assert max(e.line for e in chosen.good) > 2 * MOST_GOOD
    assert choose(enumerate(lines, 1)).good == chosen.good


def test_the_page_stays_small_whatever_the_file_holds() -> None:
    messages = [{"role": "user", "content": "x" * 20_000}] * 50
    lines = [line(n, f"cause {n % 9}", calls=[call(messages=messages)] * 10) for n in range(400)]

    html = render(choose(enumerate(lines, 1)), verdict())

    assert len(html) < 10_000_000


def test_a_conversation_is_told_with_its_calls() -> None:
    tools = [{"name": "add", "arguments": '{"a": 1}'}]
    reply = {"text": "", "tool_calls": tools, "finish_reason": "tool_calls"}
    bad = call(status=400, error="too long", replies=[], repeats=2, messages_left_out=3)
    calls = [call(replies=[reply], prompt_tokens=4, completion_tokens=3, seconds=0.25), bad]

    html = render(choose([(1, line(17, "api_status", detail="Error 400", calls=calls))]), verdict())

    told = re.sub(r"<[^>]+>|\s+", " ", html)
    for words in ("row 17", "Error 400", "add", "4 + 3 tokens, 250 ms", "too long"):
        assert words in told
    assert "the first 2 messages as in the call before" in told
    assert "3 more messages in the file" in told
    assert "{&#34;a&#34;: 1}" in html


def test_hostile_text_is_shown_and_does_nothing() -> None:
    evil: dict[str, Any] = {"role": EVIL, "content": EVIL, "name": EVIL}
    tool = {"name": EVIL, "arguments": EVIL}
    replies = [{"text": EVIL, "reasoning": EVIL, "tool_calls": [tool], "finish_reason": EVIL}]
    one = call(protocol=EVIL, request_id=EVIL, error=EVIL, messages=[evil], replies=replies)
    lines = [line(0, EVIL, detail=EVIL, trace=EVIL, check=EVIL, calls=[one]), line(1, reward=EVIL)]

    html = render(choose(enumerate(lines, 1)), verdict(next=EVIL, extra={"target": EVIL}), "x")

    assert "<script" not in html
    assert "<img" not in html
    assert "\u202e" not in html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


@pytest.mark.parametrize("value", [None, 3, "text", [], [1], {"a": 1}, [[]], [{"messages": 7}]])
@pytest.mark.parametrize("key", ["calls", "reward", "cause", "seconds", "row", "detail"])
def test_a_line_of_any_form_is_shown(key: str, value: Any) -> None:
    html = render(choose([(1, line(0) | {key: value})]), verdict())

    assert "line 1 of episodes.jsonl" in html


def test_a_long_text_says_how_much_of_it_is_missing() -> None:
    view = episode_view(line(0, "exception", detail="a" * LONGEST_TEXT + "b" * 1234), 1)

    assert "[1,234 more characters in the file]" in view.detail
    assert view.detail.endswith("bbb")


def test_the_page_of_a_run_leads_back_to_the_runs_page(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "my run")
    run.agents.root.mkdir(parents=True)
    run.config.write_text("", encoding="utf-8")
    alone = AgentsPaths(tmp_path / "agent")
    alone.root.mkdir()

    for paths in (run.agents, alone):
        paths.episodes.write_text(json.dumps(line(0)), encoding="utf-8")
        write_page(paths, verdict())

    assert 'href="../report/index.html"' in run.agents.page.read_text(encoding="utf-8")
    assert "index.html" not in alone.page.read_text(encoding="utf-8")
