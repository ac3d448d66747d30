"""Episodes against a real local server that speaks the OpenAI protocol, well and badly."""

import asyncio
import contextlib
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.agent_checks.checks import CheckPlan, CheckSettings, run_checks
from shakedown.agent_checks.episode_source import episode_source
from shakedown.agent_checks.episodes import Episode, RunResult
from shakedown.agent_checks.judge import ServerProbe, judge_run, metrics, summary
from shakedown.agent_checks.runner import RunSettings, run_episodes
from shakedown.agent_checks.server_probe import ask_server, with_version
from shakedown.agents.agent_pool import AgentPool, AgentSetup
from shakedown.agents.contract import Reward
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.measured import HttpCall, Measured, merged
from shakedown.cli import main
from shakedown.core.verdict import Finding, read_verdict, status_of
from shakedown.rollout.staleness import Staleness

Row = dict[str, Any]
REPOSITORY = Path(__file__).parents[3]
AGENTS = Path(__file__).parent / "agent_classes.py"


@dataclass
class ChatServer:
    """Answers `ok`; a message `status:N`, `hang`, `reset` or `slow` makes it answer so.

    `most`: requests that were there at once.
    """

    port: int = 0
    here: int = 0
    most: int = 0

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
        asked = json.loads(body)
        if asked["model"] != "policy":
            message = f"The model `{asked['model']}` does not exist."
            return 404, {"error": {"message": message, "code": 404}}
        wish, _, detail = str(asked["messages"][0]["content"]).partition(":")
        if wish == "status":
            return int(detail), {"error": {"message": "as asked"}}
        if wish in ("reset", "hang"):
            return -(wish == "hang"), None
        self.here += 1
        self.most = max(self.most, self.here)
        await asyncio.sleep(0.3 if wish == "slow" else 0.0)
        self.here -= 1
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


def endpoint_of(server: ChatServer) -> AgentEndpoint:
    return AgentEndpoint(server.url, "key", "policy")


def run(
    agent: str,
    rows: Sequence[Row],
    endpoint: AgentEndpoint | ChatServer | None = None,
    *,
    seconds: float = 60.0,
    share_tls: bool = True,
    file: Path = AGENTS,
    **settings: Any,
) -> RunResult:
    """Run an agent of `agent_classes`."""
    found = endpoint_of(endpoint) if isinstance(endpoint, ChatServer) else endpoint
    opened = episode_source(
        f"{file}:{agent}", found or AgentEndpoint(), seconds=seconds, share_tls=share_tls
    )

    async def run_rows() -> RunResult:
        async with opened as source:
            lines = [json.dumps(row) for row in rows]
            return await run_episodes(source, lines, RunSettings(**settings))

    return asyncio.run(run_rows())


def causes(result: RunResult) -> list[str]:
    return [episode.cause for episode in result.episodes]


def by_check(findings: "Sequence[Finding]") -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def ask(server_url: str) -> ServerProbe:
    return asyncio.run(ask_server(server_url))


@pytest.fixture(scope="module")
def chats(server: ChatServer) -> RunResult:
    return run("Chat", [{}, {"text": "slow"}], server, group_size=3)


def test_every_row_runs_group_size_times_and_is_rewarded(chats: RunResult) -> None:
    assert [episode.reward for episode in chats.episodes] == [1.0] * 6
    assert [episode.index for episode in chats.episodes] == list(range(6))
    assert {group: len(found) for group, found in chats.groups().items()} == {0: 3, 1: 3}
    assert sorted(e.member for e in chats.groups()[1]) == [0, 1, 2]
    assert metrics(chats)["http_requests"] == 6


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
    result = run("Chat", rows, server, seconds=2.0)
    assert causes(result) == [
        "",
        "api_status",
        "api_status",
        "unknown_model",
        "connection",
        "hanging",
        "bad_return",
        "",
    ]
    assert [episode.status for episode in result.episodes[1:4]] == [500, 429, 404]


def test_a_client_timeout_is_told_from_a_connection_fault(server: ChatServer) -> None:
    assert causes(run("Impatient", [{"text": "hang"}], server)) == ["read_timeout"]


def test_faults_of_the_agent_itself_end_its_episode_alone_and_name_the_line() -> None:
    acts = ["raise", "exit", "sleep", "stubborn", "return"]
    result = run("Faulty", [{"act": act} for act in acts], seconds=3.0)
    assert causes(result) == ["exception", "exit", "episode_timeout", "episode_timeout", "no_call"]
    assert "KeyError: 'lost'" in result.episodes[0].detail
    assert 'raise KeyError("lost")' in result.episodes[0].detail
    assert f"{AGENTS}:" in result.episodes[0].detail


def test_a_process_that_ends_costs_the_episodes_it_had_and_is_replaced() -> None:
    result = run("Faulty", [{"act": "die"}, {"act": "return"}], concurrency=1)
    assert causes(result) == ["exit", "no_call"]
    assert "exit code 3" in result.episodes[0].detail


def test_code_that_blocks_the_loop_for_ever_is_interrupted_and_named() -> None:
    acts = ["return", "block", "return", "spin", "return"]
    result = run("Faulty", [{"act": act} for act in acts], seconds=2.0)
    assert causes(result) == ["no_call", "blocked_loop", "no_call", "blocked_loop", "no_call"]
    assert any(str(AGENTS) in place for place in result.measured.blocked_at)
    lag = by_check(judge_run(result, ServerProbe()))["event_loop_lag"]
    assert str(AGENTS) in str(lag.measured)


def test_concurrency_is_never_exceeded(server: ChatServer) -> None:
    server.most = 0
    run("Chat", [{"text": "slow"}] * 16, server, concurrency=4)
    assert 1 < server.most <= 4  # a worker that still starts holds its share back


def test_agents_find_the_server_in_the_environment_also_when_they_are_imported(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://before")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    result = run("Surroundings", [{}], server, file=AGENTS.with_name("agent_with_client.py"))
    assert causes(result) == [""], result.episodes


def test_the_shared_client_is_given_and_can_be_used(server: ChatServer) -> None:
    result = run("Sharing", [{}] * 8, server)
    assert causes(result) == [""] * 8
    assert result.measured.tls_contexts == 0


def test_an_agent_that_closes_the_shared_client_closes_it_for_nobody_else(
    server: ChatServer,
) -> None:
    result = run("ClosesTheShared", [{}] * 8, server, group_size=2, concurrency=2)
    assert causes(result) == [""] * 16


def test_tls_contexts_are_shared_only_when_asked(server: ChatServer, chats: RunResult) -> None:
    shared = replace(chats, measured=replace(chats.measured, workers=2))
    assert shared.measured.tls_contexts == len(chats.episodes)
    assert "tls_contexts" in by_check(judge_run(shared, ServerProbe()))
    assert run("Chat", [{}], server, share_tls=False).measured.tls_contexts == 0


def test_waits_for_the_clients_own_pool_are_measured_and_blamed(server: ChatServer) -> None:
    result = run("OnePool", [{}], server, group_size=48)  # some for each of many workers
    assert "pool_timeout" in causes(result)
    assert max(call.pool_wait for call in result.measured.http_calls) > 0
    finding = by_check(judge_run(result, ask(server.url)))["failed_pool_timeout"]
    assert "healthy" in finding.remedy
    assert "max_connections=4096" in finding.remedy


@pytest.mark.parametrize("how", ["openai", "http"])
@pytest.mark.parametrize("thread", [False, True])
def test_a_client_that_blocks_the_loop_is_found_with_one_episode(
    server: ChatServer, tmp_path: Path, how: str, thread: bool
) -> None:
    argv = ["agent", "run", f"{AGENTS}:Synchronous", "--data", write_rows(tmp_path, [{}])]
    argv += ["--base-url", server.url, "--kwargs", json.dumps({"how": how, "thread": thread})]

    assert main([*argv, "--out", str(tmp_path / "out")]) == 0

    findings = by_check(read_verdict(tmp_path / "out" / "verdict.json").findings)
    assert ("blocking_client" in findings) is not thread
    if not thread:
        found = findings["blocking_client"]
        assert "1 requests" in found.measured
        assert f"in _{how}" in found.measured


def test_a_dead_server_is_blocked_and_not_the_agents_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = AgentEndpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "key", "policy")
        result = run("Chat", [{}], endpoint)
        view = ask(endpoint.base_url)
    findings = judge_run(result, view)
    assert causes(result) == ["connection"]
    assert status_of(findings) == "UNKNOWN"
    assert "no server answers" in summary(result, view)


def test_an_unknown_model_names_the_served_one(server: ChatServer) -> None:
    result = run("Chat", [{"model": "qwen/qwen2.5-0.5b-instruct"}], server)
    finding = by_check(judge_run(result, ask(server.url)))["failed_unknown_model"]
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


RULE = Staleness(max_concurrent=64, max_head_offpolicyness=1, batch_size=6)


def check_agent(server: ChatServer, agent: str, **settings: Any) -> Any:
    sizes = CheckSettings(**{"prompts": 6, "group_size": 4, "episode_timeout": 20.0, **settings})
    rows = [json.dumps(row) for row in ({}, {"text": "slow"})]
    plan = CheckPlan(f"{AGENTS}:{agent}", rows, endpoint_of(server), sizes, rule=RULE)
    return asyncio.run(run_checks(plan, progress=print))


def test_all_checks_pass_for_a_sound_agent(
    server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = check_agent(server, "Chat")
    assert [check.name for check in checks] == ["single", "concurrent", "grouped", "controller"]
    assert all(check.passed for check in checks)
    assert [len(check.result.episodes) for check in checks] == [1, 24, 15, 72]
    assert by_check(checks[2].findings)["group_isolation"].status == "pass"
    capacity = by_check(checks[3].findings)["controller_capacity"]
    assert (capacity.status, capacity.measured) == ("pass", "3 batches of 6 groups")
    said = capsys.readouterr().out
    assert "controller: capacity 12 groups at the start; 0 after 2 batches of 6" in said


def test_the_first_check_that_fails_names_the_cause_and_ends_the_run(server: ChatServer) -> None:
    single, concurrent, grouped, controller = check_agent(server, "OnlyAlone")
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
    assert verdict.status == "WARN"  # the rewards are all equal
    assert verdict.metrics["episodes_ok"] == len(lines) == 4
    assert verdict.metrics["reward_mean"] == 1.0


def test_the_command_reports_failures_by_cause(server: ChatServer, tmp_path: Path) -> None:
    data = write_rows(tmp_path, [message("a"), message("status:400")])
    target = f"{REPOSITORY}/config/examples/my_agent.py:MyAgent"
    out = tmp_path / "out"
    argv = ["agent", "run", target, "--data", data, "--base-url", server.url, "--out", str(out)]
    argv += ["--concurrency", "1"]
    assert main(argv) == 1
    assert read_verdict(out / "verdict.json").extra["failures"] == {"api_status": 1}
    assert main([*argv, "--min-success-rate", "0.5"]) == 0
    assert main([*argv, "--min-success-rate", "0.5", "--strict"]) == 1


def test_every_instance_is_built_with_values_of_its_own(server: ChatServer, tmp_path: Path) -> None:
    data = write_rows(tmp_path, [{}] * 3)
    argv = ["agent", "run", f"{AGENTS}:Counting", "--data", data, "--out", str(tmp_path / "out")]
    argv += ["--base-url", server.url]

    code = main([*argv, "--kwargs", '{"start": 40, "seen": []}', "--kwargs", "start=50"])

    assert code == 0
    metrics = read_verdict(tmp_path / "out" / "verdict.json").metrics
    assert (metrics["reward_mean"], metrics["reward_std"]) == (51.0, 0.0)


def test_a_group_has_one_instance_and_every_group_another(
    server: ChatServer, tmp_path: Path
) -> None:
    """As in AReaL: what `run` keeps on `self` is the group's."""
    data = write_rows(tmp_path, [{}] * 8)
    argv = ["agent", "run", f"{AGENTS}:Counting", "--data", data, "--out", str(tmp_path / "out")]
    argv += ["--base-url", server.url]

    assert main([*argv, "--kwargs", '{"start": 40, "seen": []}', "--group-size", "3"]) == 0

    lines = (tmp_path / "out" / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = defaultdict(list)
    for episode in map(json.loads, lines):
        rewards[episode["group"]].append(episode["reward"])
    assert [sorted(each) for each in rewards.values()] == [[41.0, 42.0, 43.0]] * 8


def test_the_instance_of_a_group_that_has_ended_is_gone() -> None:
    """A stage has many thousand groups."""

    async def run_groups() -> list[Reward | None]:
        rewards = []
        async with AgentPool(AgentSetup(f"{AGENTS}:Living", AgentEndpoint()), workers=1) as pool:
            for _ in range(4):
                async with pool.group() as group:
                    results = [await pool.run_episode("{}", group=group) for _ in range(2)]
                rewards += [result.reward for result in results]
        return rewards

    assert asyncio.run(run_groups()) == [1.0] * 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("strat=50", "did you mean 'start'"),
        ("50", "expected key=value or a JSON object"),
        ('{"start": 50', "is not a JSON object"),
    ],
)
def test_arguments_that_cannot_be_given_are_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    argv = ["agent", "run", f"{AGENTS}:Counting", "--data", write_rows(tmp_path, [{}])]
    try:
        code = main([*argv, "--kwargs", given])
    except SystemExit as ended:  # argparse's own way
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_class_that_is_not_there_is_a_usage_error_with_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path, [{}])
    assert main(["agent", "run", f"{AGENTS}:Chatt", "--data", data]) == 2
    assert "did you mean 'Chat'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows"),
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


def rewarded(*rewards: Reward, group_size: int = 1) -> list[Episode]:
    return [
        Episode(index, *divmod(index, group_size), reward=reward)
        for index, reward in enumerate(rewards)
    ]


def test_metrics_are_of_good_episodes_only() -> None:
    failed = Episode(2, 2, 0, cause="exception", seconds=9.0)
    numbers = metrics(RunResult([*rewarded(0.0, 1.0), failed]))
    assert (numbers["reward_mean"], numbers["reward_std"]) == (0.5, 0.5)
    assert numbers["failed_exception"] == 1
    assert numbers["latency_max_seconds"] == 0


def test_an_episode_whose_agent_failed_counts_as_0_as_in_training() -> None:
    failed = Episode(0, 0, 0, cause="exception", by_agent=True, calls_made=2, calls_failed=1)
    others = [replace(failed, calls_failed=2), replace(failed, by_agent=False)]  # left out
    result = RunResult([failed, *others, Episode(3, 0, 3, reward=1.0)])
    told = by_check(judge_run(result, ServerProbe()))["groups_with_equal_rewards"]
    assert metrics(result)["reward_mean"] == 0.5
    assert (told.status, told.measured) == ("pass", "0 of 1 groups")


def test_equal_rewards_in_every_group_are_told() -> None:
    rewards: list[Reward] = [{"c-1": 1.0, "c-2": 0.0}] * 4
    result = RunResult(rewarded(*rewards, group_size=2))
    findings = by_check(judge_run(result, ServerProbe()))
    told = findings["groups_with_equal_rewards"]
    assert (told.status, told.measured) == ("warn", "2 of 2 groups; all rewards are 0.5")
    assert "may catch an error of its own" in told.remedy


def test_one_group_with_differing_rewards_is_enough() -> None:
    result = RunResult(rewarded(1.0, 1.0, 0.0, 1.0, group_size=2))
    findings = by_check(judge_run(result, ServerProbe()))
    told = findings["groups_with_equal_rewards"]
    assert (told.status, told.measured) == ("pass", "1 of 2 groups")


def test_a_slow_loop_warns_of_lag() -> None:
    late = RunResult(rewarded(1.0), Measured(lags=[3.0]))
    finding = by_check(judge_run(late, ServerProbe()))["event_loop_lag"]
    assert (finding.status, finding.blame) == ("warn", "code")


def test_a_loop_without_a_cpu_is_told_and_warns_of_nothing() -> None:
    starved = RunResult(rewarded(1.0), Measured(lags=[0.5], cpu_wait=9.0))
    finding = by_check(judge_run(starved, ServerProbe()))["event_loop_lag"]
    assert (finding.status, finding.blame) == ("pass", "none")
    assert "the loop waited 9.0 s for a CPU" in str(finding.measured)


def test_connect_timeouts_of_a_loop_without_a_cpu_are_the_machines() -> None:
    late = Episode(0, 0, 0, cause="connect_timeout", detail="ConnectTimeout")
    starved = RunResult([late], Measured(lags=[3.0], cpu_wait=9.0))
    server = ServerProbe(asked=True, reachable=True)
    finding = by_check(judge_run(starved, server))["failed_connect_timeout"]
    assert finding.blame == "environment"
    assert "the loop waited 9.0 s for a CPU" in finding.remedy


def test_what_workers_measured_is_added_up() -> None:
    parts = [
        Measured(
            [HttpCall(status=200)], [0.1], 0.2, {"a.py:1": 2.0, "a.py:2": 1.0}, 3, 0.02, workers=1
        ),
        Measured([HttpCall()], [0.3], 0.1, {"a.py:1": 1.0}, 1, 0.03, workers=1),
    ]
    both = merged([Measured.read(asdict(part)) for part in parts])
    assert [call.status for call in both.http_calls] == [200, 0]
    assert both.blocked_at == {"a.py:1": 2.0, "a.py:2": 1.0}
    assert (both.lags, both.cpu_wait) == ([0.1, 0.3], 0.2)
    assert (both.tls_contexts, both.tls_seconds_each) == (4, 0.03)
    assert both.workers == 2
