"""Episodes against a real local server that speaks the OpenAI protocol, well and badly."""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from shakedown.agent_checks.checks import CheckPlan, CheckSettings, run_checks
from shakedown.agent_checks.judge import ServerProbe, judge_run, metrics, summary
from shakedown.agent_checks.server_probe import ask_server, with_version
from shakedown.agents.runner import (
    AgentEndpoint,
    RunResult,
    RunSettings,
    drive,
    environment,
    run_episodes,
)
from shakedown.cli import main
from shakedown.core.verdict import Finding, read_verdict, status_of

Row = dict[str, Any]
REPOSITORY = Path(__file__).parents[3]


@dataclass
class ChatServer:
    """Answers `ok`; a message `status:N`, `hang`, `reset` or `slow` makes it answer so."""

    port: int = 0
    requests: int = 0
    authorizations: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError)
        with contextlib.closing(writer), contextlib.suppress(*ends):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.authorizations.add(headers.get("authorization", ""))
                status, answer = await self.answer(lines[0].split()[1], body)
                if status < 0:
                    await reader.read()  # never answers; ends when the client goes away
                if status <= 0:
                    break
                data = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()

    async def answer(self, path: str, body: bytes) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy"}]}
        self.requests += 1
        asked = json.loads(body)
        if asked["model"] != "policy":
            message = f"The model `{asked['model']}` does not exist."
            return 404, {"error": {"message": message, "code": 404}}
        wish, _, detail = str(asked["messages"][0]["content"]).partition(":")
        if wish == "status":
            return int(detail), {"error": {"message": "as asked"}}
        if wish in ("reset", "hang"):
            return -(wish == "hang"), None
        await asyncio.sleep(0.3 if wish == "slow" else 0.0)
        said = {"role": "assistant", "content": "ok"}
        choice = {"index": 0, "message": said, "finish_reason": "stop"}
        base = {"id": "c-1", "object": "chat.completion", "created": 0, "model": "policy"}
        return 200, {**base, "choices": [choice]}


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    chat = ChatServer()
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def life() -> None:
        listening = await asyncio.start_server(chat.serve, "127.0.0.1", 0, backlog=1024)
        chat.port = listening.sockets[0].getsockname()[1]
        loops.append(asyncio.get_running_loop())
        ready.set()
        await stop.wait()
        listening.close()

    thread = threading.Thread(target=asyncio.run, args=(life(),))
    thread.start()
    assert ready.wait(30)
    yield chat
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(30)


class Chat:
    """Sends the row's text; no retries, so that each fault is seen once."""

    limits: dict[str, Any] = {"max_retries": 0}  # noqa: RUF012 - read only

    async def run(self, data: Row, **extra: Any) -> Any:
        async with AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], **self.limits
        ) as client:
            answer = await client.chat.completions.create(
                model=data.get("model") or extra["model"],
                messages=[{"role": "user", "content": data.get("text", "hello")}],
            )
        return data.get("reward", float(answer.choices[0].message.content == "ok"))


class Faulty:
    """Does what the row says, without a server."""

    async def run(self, data: Row, **_: Any) -> Any:
        act = data["act"]
        if act == "raise":
            raise KeyError("lost")
        if act == "exit":
            raise SystemExit(3)
        if act == "sleep":
            await asyncio.sleep(3600)
        if act == "block":
            time.sleep(3600)  # noqa: ASYNC251 - the fault that is tested
        if act == "spin":
            while True:
                with contextlib.suppress(Exception):
                    json.dumps(data)
        if act == "stubborn":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        return data.get("reward", 1.0)


def run(
    agent: type, rows: list[Row], server: ChatServer | None = None, **settings: Any
) -> RunResult:
    endpoint = AgentEndpoint(server.url, "key", "policy") if server else AgentEndpoint()
    return drive(run_episodes(agent, rows, endpoint, RunSettings(**settings)))


def causes(result: RunResult) -> list[str]:
    return [episode.cause for episode in result.episodes]


def by_check(findings: "list[Finding]") -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_every_row_runs_group_size_times_and_is_rewarded(server: ChatServer) -> None:
    result = run(Chat, [{}, {"text": "slow"}], server, group_size=3)
    assert [episode.reward for episode in result.episodes] == [1.0] * 6
    assert {group: len(found) for group, found in result.groups().items()} == {0: 3, 1: 3}
    assert sorted(e.member for e in result.groups()[1]) == [0, 1, 2]
    assert metrics(result)["http_requests"] == 6


def test_each_failure_has_its_cause_and_loses_no_other_episode(server: ChatServer) -> None:
    rows: list[Row] = [
        {},
        {"text": "status:500"},
        {"text": "status:429"},
        {"model": "other"},
        {"text": "reset"},
        {"text": "hang"},
        {"reward": True},
        {},
    ]
    result = run(Chat, rows, server, episode_timeout=2.0)
    assert causes(result) == [
        "",
        "api_status",
        "api_status",
        "unknown_model",
        "connection",
        "episode_timeout",
        "bad_return",
        "",
    ]
    assert [episode.status for episode in result.episodes[1:4]] == [500, 429, 404]


def test_a_client_timeout_is_told_from_a_connection_fault(server: ChatServer) -> None:
    class Impatient(Chat):
        limits = {"max_retries": 0, "timeout": 0.2}  # noqa: RUF012

    assert causes(run(Impatient, [{"text": "hang"}], server)) == ["read_timeout"]


def test_faults_of_the_agent_itself_name_the_line() -> None:
    result = run(Faulty, [{"act": "raise"}, {"act": "exit"}, {"act": "return"}])
    assert causes(result) == ["exception", "exit", ""]
    assert "KeyError: 'lost'" in result.episodes[0].detail
    assert 'raise KeyError("lost")' in result.episodes[0].detail
    assert f"{__file__}:" in result.episodes[0].detail


def test_an_episode_that_waits_for_ever_ends_alone() -> None:
    result = run(Faulty, [{"act": "sleep"}, {"act": "return"}], episode_timeout=0.3)
    assert causes(result) == ["episode_timeout", ""]


@pytest.mark.parametrize("act", ["block", "spin"])
def test_code_that_blocks_the_loop_for_ever_is_interrupted_and_named(act: str) -> None:
    result = run(Faulty, [{"act": "return"}, {"act": act}, {"act": "return"}], episode_timeout=0.5)
    assert causes(result) == ["", "blocked_loop", ""]
    assert result.interrupted >= 1
    assert any(__file__ in place for place in result.blocked_at)
    lag = by_check(judge_run(result, ServerProbe()))["event_loop_lag"]
    assert __file__ in str(lag.measured)


def test_an_episode_that_ignores_its_cancellation_does_not_hold_the_end_back() -> None:
    result = run(Faulty, [{"act": "stubborn"}, {"act": "return"}], episode_timeout=0.2)
    assert causes(result) == ["episode_timeout", ""]


def test_concurrency_is_never_exceeded() -> None:
    seen: list[int] = [0, 0]

    class Counting:
        async def run(self, _data: Row, **_: Any) -> float:
            seen[0] += 1
            seen[1] = max(seen)
            await asyncio.sleep(0.01)
            seen[0] -= 1
            return 1.0

    run(Counting, [{}] * 20, concurrency=4)
    assert seen[1] == 4


def test_agents_find_the_server_in_the_environment_which_is_restored(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://before")
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with environment(AgentEndpoint(server.url, "key", "policy")):
        assert os.environ["OPENAI_BASE_URL"] == server.url
        assert os.environ["ANTHROPIC_BASE_URL"] == server.url.removesuffix("/v1")
        assert os.environ["OPENAI_MODEL"] == "policy"
    assert os.environ["OPENAI_BASE_URL"] == "http://before"
    assert "ANTHROPIC_BASE_URL" not in os.environ


def test_the_shared_client_is_given_and_can_be_used(server: ChatServer) -> None:
    class Sharing:
        async def run(self, _data: Row, **extra: Any) -> float:
            client = AsyncOpenAI(
                base_url=extra["base_url"],
                api_key=extra["api_key"],
                http_client=extra["http_client"],
            )
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hello"}]
            )
            return 1.0

    result = run(Sharing, [{}] * 8, server)
    assert causes(result) == [""] * 8
    assert result.tls_contexts == 1


def test_tls_contexts_are_shared_only_when_asked(server: ChatServer) -> None:
    shared = run(Chat, [{}] * 4, server)
    assert shared.tls_contexts == 5  # one an episode and the shared client's
    assert "tls_contexts" in by_check(judge_run(shared, ServerProbe()))
    assert run(Chat, [{}] * 4, server, share_tls=False).tls_contexts == 0


def test_waits_for_the_clients_own_pool_are_measured_and_blamed(server: ChatServer) -> None:
    class OnePool:
        client: Any = None
        left = 4

        async def run(self, _data: Row, **extra: Any) -> float:
            import httpx2

            if OnePool.client is None:
                limits = httpx2.Limits(max_connections=1)
                timeout = httpx2.Timeout(60, pool=0.45)
                OnePool.client = httpx2.AsyncClient(limits=limits, timeout=timeout)
            client = AsyncOpenAI(
                base_url=extra["base_url"], api_key="k", http_client=OnePool.client, max_retries=0
            )
            try:
                await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "slow"}]
                )
            finally:
                OnePool.left -= 1
                if not OnePool.left:
                    await OnePool.client.aclose()
            return 1.0

    result = run(OnePool, [{}] * 4, server)
    assert "pool_timeout" in causes(result)
    assert max(e.pool_wait for e in result.http_calls) > 0.2
    view = drive(ask_server(server.url))
    finding = by_check(judge_run(result, view))["failed_pool_timeout"]
    assert "healthy" in finding.remedy
    assert "max_connections=4096" in finding.remedy


def test_a_dead_server_is_blocked_and_not_the_agents_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = AgentEndpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "key", "policy")
        result = drive(run_episodes(Chat, [{}], endpoint, RunSettings()))
        view = drive(ask_server(endpoint.base_url))
    findings = judge_run(result, view)
    assert causes(result) == ["connection"]
    assert status_of(findings) == "BLOCKED"
    assert "no server answers" in summary(result, view)


def test_an_unknown_model_names_the_served_one(server: ChatServer) -> None:
    result = run(Chat, [{"model": "qwen/qwen2.5-0.5b-instruct"}], server)
    view = drive(ask_server(server.url))
    finding = by_check(judge_run(result, view))["failed_unknown_model"]
    assert "the server serves policy" in finding.remedy
    assert "qwen/qwen2.5-0.5b-instruct" in str(finding.measured)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("http://h:1/other/v1", "http://h:1/other/v1"),
        ("", ""),
    ],
)
def test_a_url_without_a_path_gets_the_version(given: str, url: str) -> None:
    assert with_version(given) == url


def check_agent(server: ChatServer, agent: type, **settings: Any) -> Any:
    sizes = CheckSettings(**{"prompts": 6, "group_size": 4, "episode_timeout": 20.0, **settings})
    plan = CheckPlan(
        agent, [{}, {"text": "slow"}], AgentEndpoint(server.url, "key", "policy"), sizes
    )
    return drive(run_checks(plan))


def test_all_checks_pass_for_a_sound_agent(server: ChatServer) -> None:
    checks = check_agent(server, Chat)
    assert [check.name for check in checks] == ["single", "concurrent", "grouped", "controller"]
    assert all(check.passed for check in checks)
    assert [len(check.result.episodes) for check in checks] == [1, 24, 15, 48]
    assert by_check(checks[2].findings)["group_isolation"].status == "pass"


def test_the_first_check_that_fails_names_the_cause_and_ends_the_run(server: ChatServer) -> None:
    class OnlyAlone:
        busy = 0

        async def run(self, _data: Row, **_: Any) -> float:
            if OnlyAlone.busy:
                raise RuntimeError("this framework runs one episode at a time")
            OnlyAlone.busy += 1
            await asyncio.sleep(0.01)
            OnlyAlone.busy -= 1
            return 1.0

    single, concurrent, grouped, controller = check_agent(server, OnlyAlone)
    assert single.passed
    assert not concurrent.passed
    assert "one episode at a time" in str(by_check(concurrent.findings)["failed_exception"])
    assert grouped.findings[0].status == controller.findings[0].status == "skip"


def write_rows(folder: Path, rows: list[Row]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def message(text: str) -> Row:
    return {"messages": [{"role": "user", "content": text}]}


def test_the_command_writes_a_verdict_and_one_line_an_episode(
    server: ChatServer, tmp_path: Path
) -> None:
    data = write_rows(tmp_path, [message("a"), message("b"), message("c")])
    target = f"{REPOSITORY}/config/examples/my_agent.py:MyAgent"
    options = ["--base-url", server.url.removesuffix("/v1"), "--limit", "2", "--group-size", "2"]
    out = tmp_path / "out"
    code = main(["agent", "run", target, "--data", data, *options, "--out", str(out)])
    verdict = read_verdict(out / "verdict.json")
    lines = (out / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    assert code == 0
    assert verdict.status == "PASS"
    assert verdict.metrics["episodes_ok"] == len(lines) == 4
    assert verdict.metrics["reward_mean"] == 1.0


def test_the_command_reports_failures_by_cause(server: ChatServer, tmp_path: Path) -> None:
    data = write_rows(tmp_path, [message("a"), message("status:400")])
    target = f"{REPOSITORY}/config/examples/my_agent.py:MyAgent"
    out = tmp_path / "out"
    argv = ["agent", "run", target, "--data", data, "--base-url", server.url, "--out", str(out)]
    assert main(argv) == 1
    assert read_verdict(out / "verdict.json").extra["failures"] == {"api_status": 1}
    assert main([*argv, "--min-success-rate", "0.5"]) == 0
    assert main([*argv, "--min-success-rate", "0.5", "--strict"]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no rows"),
        ('{"a": 1}\nnot json\n', "rows.jsonl, line 2: not JSON"),
        ("[1, 2]\n", "rows.jsonl, line 1: expected an object"),
        ("\udcff", "cannot read data"),
    ],
)
def test_data_that_cannot_be_used_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(text.encode("utf-8", "surrogateescape"))
    target = f"{REPOSITORY}/config/examples/my_agent.py:MyAgent"
    assert main(["agent", "run", target, "--data", str(data)]) == 2
    assert said in capsys.readouterr().err


def test_a_verdict_that_cannot_be_written_is_said(server: ChatServer, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way", encoding="utf-8")
    data = write_rows(tmp_path, [message("a")])
    target = f"{REPOSITORY}/config/examples/my_agent.py:MyAgent"
    argv = ["agent", "run", target, "--data", data, "--base-url", server.url]
    assert main([*argv, "--out", str(blocker / "out")]) == 3


def test_metrics_are_of_good_episodes_only() -> None:
    result = run(Faulty, [{"act": "return", "reward": r} for r in (0.0, 1.0)] + [{"act": "raise"}])
    numbers = metrics(result)
    assert (numbers["reward_mean"], numbers["reward_std"]) == (0.5, 0.5)
    assert numbers["failed_exception"] == 1


def test_equal_rewards_in_every_group_are_told() -> None:
    rows: list[Row] = [{"act": "return", "reward": {"c-1": 1.0, "c-2": 0.0}}] * 2
    findings = by_check(judge_run(run(Faulty, rows, group_size=2), ServerProbe()))
    assert findings["groups_with_equal_rewards"].measured == "2 of 2 groups"


def test_a_slow_loop_warns_of_lag() -> None:
    result = run(Faulty, [{"act": "return"}])
    late = replace(result, lags=[3.0])
    finding = by_check(judge_run(late, ServerProbe()))["event_loop_lag"]
    assert (finding.status, finding.blame) == ("warn", "code")
