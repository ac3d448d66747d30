"""`shakedown agent run` takes training's path wherever the server's replies can be recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from shakedown.agents.episode_lines import read_episodes
from shakedown.cli import main
from shakedown.core.verdict import Finding, Verdict, read_verdict
from tests.unit.agents.wire_server import WireServer, wire_server
from tests.unit.rollout.chat_engine import chatting

REPOSITORY = Path(__file__).parents[3]
AGENTS = Path(__file__).parent / "swallowing_agents.py"
KINDS = f"{REPOSITORY}/tests/unit/rollout/agent_kinds.py:Kinds"
BLOCKING = f"{REPOSITORY}/tests/unit/agents/agent_classes.py:Synchronous"
Row = dict[str, Any]


def agent_run(
    folder: Path, url: str, rows: list[Row], *more: str, target: str = f"{AGENTS}:Swallows"
) -> tuple[int, Verdict]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = ["agent", "run", target, "--data", str(data), "--base-url", url]
    code = main([*argv, "--out", str(folder), "--episode-timeout", "30", *more])
    return code, read_verdict(folder / "verdict.json")


def finding(verdict: Verdict, check: str) -> Finding:
    (found,) = [each for each in verdict.findings if each.check == check]
    return found


def seen_by(folder: Path) -> set[str]:
    return {line["calls_seen_by"] for line in read_episodes(folder / "episodes.jsonl")}


def test_a_server_that_tells_token_ids_is_asked_through_the_proxy(tmp_path: Path) -> None:
    rows: list[Row] = [{"kind": "narrows"}, {"kind": "two_turns"}]
    with chatting() as engine:
        code, verdict = agent_run(tmp_path, engine.url, rows, target=KINDS)

    assert (code, seen_by(tmp_path)) == (0, {"proxy"})
    assert finding(verdict, "recorded_as_in_training").status == "pass"
    asked = [body for _, body in engine.seen[1:]]
    # GRPO's temperature, the agent's own lengths.
    assert {body["temperature"] for body in asked} == {1.0}
    assert sorted(body.get("max_tokens", 0) for body in asked) == [0, 0, 64]
    assert all(body["return_token_ids"] for body in asked)
    # A checkpoint's generation_config.json would fill in what is left out.
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert all(body | neutral == body for body in asked)


def test_another_model_name_is_answered_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with wire_server() as server:
        code, _ = agent_run(
            tmp_path,
            server.url,
            [{"messages": [{"role": "user", "content": "x"}]}],
            target=f"{AGENTS}:Appends",
        )

    said = capsys.readouterr().out
    assert (code, said.count("the agent names the model 'm': 'policy' answers")) == (0, 1)


def test_with_a_config_the_sampling_is_its_stages(tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    grpo = {"agent": KINDS, "max_tokens": 5, "temperature": 0.5}
    more.write_text(json.dumps({"stages": {"grpo": {"grpo": grpo}}}), encoding="utf-8")
    config = ["--config", str(REPOSITORY / "config" / "config.yaml"), str(more)]
    with chatting() as engine:
        code, _ = agent_run(tmp_path, engine.url, [{"kind": "narrows"}], *config, target=KINDS)

    asked = [body for _, body in engine.seen[1:]]
    assert (code, [(body["max_tokens"], body["temperature"]) for body in asked]) == (0, [(5, 0.5)])


def test_a_server_without_token_ids_is_asked_unchanged_and_that_is_said(tmp_path: Path) -> None:
    with wire_server(ids=False) as server:
        code, verdict = agent_run(tmp_path, server.url, [{"texts": ["x"]}])

    told = finding(verdict, "recorded_as_in_training")
    assert (code, seen_by(tmp_path)) == (0, {"relay"})
    assert told.status == "warn"
    assert "prompt_token_ids" in str(told.measured)
    assert "training with the agent needs" in told.remedy


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("how", ["openai", "http"])
def test_a_client_that_blocks_the_loop_is_found_through_the_proxy_too(
    tmp_path: Path, how: str, thread: bool
) -> None:
    kwargs = json.dumps({"how": how, "thread": thread})
    with wire_server() as server:
        code, verdict = agent_run(tmp_path, server.url, [{}], "--kwargs", kwargs, target=BLOCKING)

    found = [each for each in verdict.findings if each.check == "blocking_client"]
    assert (code, seen_by(tmp_path)) == (0, {"proxy"})
    assert len(found) == (not thread)


def test_a_row_is_each_episodes_own(tmp_path: Path) -> None:
    with wire_server() as server:
        rows: list[Row] = [{"messages": [{"role": "user", "content": "x"}]}]
        target = f"{AGENTS}:Appends"
        more = ("--group-size", "4", "--concurrency", "1")
        code, _ = agent_run(tmp_path, server.url, rows, *more, target=target)

    rewards = [line["reward"] for line in read_episodes(tmp_path / "episodes.jsonl")]
    assert (code, rewards) == (0, [1.0] * 4)


def test_the_kind_of_server_is_told_by_its_answer_alone(tmp_path: Path) -> None:
    """Both have the same address, one after the other."""
    server = WireServer(ids=False)
    try:
        agent_run(tmp_path, server.url, [{"texts": ["x"]}])
        before = seen_by(tmp_path)
        server.ids = True
        agent_run(tmp_path, server.url, [{"texts": ["x"]}])
    finally:
        server.die()

    assert (before, seen_by(tmp_path)) == ({"relay"}, {"proxy"})


@pytest.mark.parametrize(("agent", "shared"), [("Remembers", True), ("OwnHistory", False)])
def test_a_history_that_episodes_share_is_found_by_its_contents(
    tmp_path: Path, agent: str, shared: bool
) -> None:
    rows: list[Row] = [{"texts": [f"talk {number}"]} for number in range(4)]
    with wire_server() as server:
        more = ("--concurrency", "1", "--group-size", "2")
        code, verdict = agent_run(tmp_path, server.url, rows, *more, target=f"{AGENTS}:{agent}")

    lines = sorted(read_episodes(tmp_path / "episodes.jsonl"), key=lambda line: line["index"])
    causes = [line["cause"] for line in lines]
    # The samples of the first row have each other's replies alone, which are not compared.
    assert (code, causes) == ((1, [""] * 2 + ["shared_history"] * 6) if shared else (0, [""] * 8))
    if shared:
        assert (
            "a message of sample 0 of row 1 contains text sampled for sample" in lines[2]["detail"]
        )
        assert "of row 0: 'talk 0: the quick" in lines[2]["detail"]
        assert "not in the class" in finding(verdict, "failed_shared_history").remedy


@pytest.mark.parametrize("protocol", ["openai", "responses", "messages"])
def test_rewards_are_by_the_ids_that_the_agent_sees_in_every_protocol(
    tmp_path: Path, protocol: str
) -> None:
    rows: list[Row] = [{"texts": ["x", "longer"], "by": protocol, "keyed": True}]
    rows += [{"texts": ["x"], "by": protocol, "foreign": True}]
    with wire_server() as server:
        code, _ = agent_run(tmp_path, server.url, rows)

    good, foreign = sorted(read_episodes(tmp_path / "episodes.jsonl"), key=lambda each: each["row"])
    assert (code, good["cause"], len(good["reward"])) == (1, "", 2), good
    assert foreign["cause"] == "bad_return"
    assert f"the replies' ids are {min(good['reward'])!r}" in foreign["detail"]


def test_a_server_that_closes_kept_connections_costs_no_episode(tmp_path: Path) -> None:
    rows: list[Row] = [{"texts": ["x", "y", "z"], "by": by} for by in ("openai", "stream")] * 4
    with wire_server(once=True) as server:
        code, verdict = agent_run(tmp_path, server.url, rows)

    assert (code, verdict.status) == (0, "PASS"), verdict.summary
    again = finding(verdict, "calls_sent_again")
    assert (again.status, again.blame) == ("pass", "none")
    assert "proxy to engine" in str(again.measured)
    calls = [call for line in read_episodes(tmp_path / "episodes.jsonl") for call in line["calls"]]
    assert {call["status"] for call in calls} == {200}
    assert sum(call["resent"] > 0 for call in calls) == int(str(again.measured).split()[0]) > 0


@pytest.mark.parametrize(
    ("models", "more", "said"),
    [
        (401, (), "refuses the key: HTTP 401"),
        (500, (), "models: HTTP 500, no list of models"),
        (404, (), "models: HTTP 404, no list of models"),
        (200, ("--model", "other"), "does not serve 'other'; it serves policy"),
        (0, (), "no server answers at"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_before_the_agent_is_run(
    tmp_path: Path, models: int, more: tuple[str, ...], said: str
) -> None:
    with wire_server(models=models) as server:
        if not models:
            server.die()
        code, verdict = agent_run(tmp_path, server.url, [{"texts": ["x"]}], *more)

    assert (code, verdict.status, server.asked) == (3, "UNKNOWN", [])
    assert said in verdict.summary
    assert finding(verdict, "server").subject == "server"
    assert not list(read_episodes(tmp_path / "episodes.jsonl"))


@pytest.mark.parametrize("names", [("min_p",), ("top_k", "repetition_penalty")])
def test_what_a_server_does_not_let_be_neutral_is_warned_of_by_name(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with wire_server(not_taken=names) as server:
        code, verdict = agent_run(tmp_path, server.url, [{"texts": ["x"]}])

    told = finding(verdict, "sampling_not_neutral")
    assert (code, verdict.status, seen_by(tmp_path)) == (0, "WARN", {"proxy"})
    assert all(name in str(told.measured) for name in names)
    assert server.bodies[-1]["top_p"] == 1.0
