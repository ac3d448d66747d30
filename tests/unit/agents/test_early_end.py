"""A run that cannot go on keeps what was done: a server that dies, a signal, no descriptors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shakedown.agents.episode_lines import read_episodes
from shakedown.cli import main
from shakedown.core.verdict import Verdict, read_verdict
from shakedown.inference.engines import LaunchSpec
from shakedown.inference.folder import ServerOrder
from shakedown.inference.server import start
from tests.unit.agents.wire_server import wire_server

PATIENCE = 300  # seconds, on a machine with much other work
REPOSITORY = Path(__file__).parents[3]
AGENTS = Path(__file__).parent / "swallowing_agents.py"
Row = dict[str, Any]


def arguments(folder: Path, url: str, rows: list[Row], *more: str) -> list[str]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = ["agent", "run", f"{AGENTS}:Swallows", "--data", str(data), "--base-url", url]
    return [*argv, "--out", str(folder), "--episode-timeout", "30", *more]


def found(folder: Path) -> tuple[Verdict, list[dict[str, Any]]]:
    lines = list(read_episodes(folder / "episodes.jsonl"))
    return read_verdict(folder / "verdict.json"), sorted(lines, key=lambda line: line["row"])


@pytest.mark.parametrize("ids", [True, False], ids=["proxy", "direct"])
def test_after_a_server_has_died_nothing_more_is_asked_and_what_was_done_is_kept(
    tmp_path: Path, ids: bool
) -> None:
    rows: list[Row] = [{"texts": ["x"]} for _ in range(40)]
    with wire_server(ids=ids, dies_after=11) as server:  # one of them asks for token ids
        code = main(arguments(tmp_path, server.url, rows, "--concurrency", "1"))

    verdict, lines = found(tmp_path)
    causes = [line["cause"] for line in lines]
    assert (code, verdict.status) == (3, "UNKNOWN")
    assert causes.count("") == 10
    assert (causes[10] != "not_asked", causes[11:]) == (True, ["not_asked"] * 29)
    (gone,) = [each for each in verdict.findings if each.check == "server_gone"]
    assert "ClientConnectorError" in str(gone.measured)
    assert "it last answered at " in str(gone.measured)
    assert f"{causes.count('not_asked')} were not run" in verdict.summary
    assert verdict.metrics["reward_mean"] == 1.0


def test_an_agents_own_failures_stay_failures_when_the_server_dies(tmp_path: Path) -> None:
    rows: list[Row] = [{"texts": ["x"], "reward": None}] * 8 + [{"texts": ["x"]}] * 8
    with wire_server(dies_after=9) as server:
        code = main(arguments(tmp_path, server.url, rows, "--concurrency", "1"))

    assert (code, found(tmp_path)[0].status) == (1, "FAIL")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_the_verdict_with_what_was_done(
    tmp_path: Path, number: signal.Signals
) -> None:
    rows: list[Row] = [{"texts": ["x"]}] * 4 + [{"texts": ["hang"]}] * 4 + [{"texts": ["x"]}] * 4
    with wire_server() as server:
        argv = arguments(tmp_path, server.url, rows, "--concurrency", "4")
        running = started(argv)
        wait_for(lambda: ended(tmp_path) == 4)
        wait_for(lambda: server.asked.count("hang") == 4)

        running.send_signal(number)
        code = running.wait(PATIENCE)

    verdict, lines = found(tmp_path)
    assert code == 128 + number
    assert verdict.status == "UNKNOWN"
    assert f"stopped by {number.name}: 4 of 12 episodes had ended, 8 were not run" in (
        verdict.summary
    )
    assert [line["cause"] for line in lines] == [""] * 4 + ["not_asked"] * 8


@pytest.mark.slow
def test_a_second_run_into_one_folder_is_refused_and_the_first_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with wire_server() as server:
        running = started(arguments(tmp_path, server.url, [{"texts": ["hang"]}]))
        wait_for(lambda: "hang" in server.asked)

        second = main(arguments(tmp_path, server.url, [{"texts": ["x"]}]))

        said = capsys.readouterr().err
        running.send_signal(signal.SIGINT)
        running.wait(PATIENCE)
        _, (line,) = found(tmp_path)
        third = main(arguments(tmp_path, server.url, [{"texts": ["x"]}]))
    assert f"is in use: shakedown agent run (pid {running.pid} on " in said
    assert line["cause"] == "not_asked"
    assert (second, third) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("check", "before"), [("single", 0), ("concurrent", 1), ("controller", 1 + 4 + 3)]
)
def test_a_signal_in_a_check_keeps_it_and_those_before(
    tmp_path: Path, number: signal.Signals, check: str, before: int
) -> None:
    done = 0 if check == "single" else 2
    with wire_server() as server:
        argv = checks_arguments(tmp_path, server.url)
        server.hangs_after = len(server.asked) + before + done
        running = started(argv)
        wait_for(lambda: server.hung)
        # An answer that the server has sent is not an episode that has ended.
        wait_for(lambda: ended(tmp_path, check) == done)

        running.send_signal(number)
        code = running.wait(PATIENCE)

    verdict, _ = found(tmp_path)
    lines = list(read_episodes(tmp_path / "episodes.jsonl"))
    of_check = [line["cause"] for line in lines if line["check"] == check]
    others = [line for line in lines if line["check"] != check and not line["on_purpose"]]
    assert code == 128 + number
    assert verdict.status == "UNKNOWN"
    assert of_check.count("") == done
    assert of_check.count("not_asked") == len(of_check) - done > 0
    assert [line["cause"] for line in others] == [""] * before
    told = f"check `{check}` ended early: stopped by {number.name}: {done} of {len(of_check)} "
    assert verdict.summary.startswith(told)
    assert verdict.next == ""


def checks_arguments(folder: Path, url: str) -> list[str]:
    """Four episodes at once, two batches of four for the controller."""
    data, more = folder / "rows.jsonl", folder / "run.yaml"
    data.write_text('{"texts": ["x"]}\n' * 2, encoding="utf-8")
    agents = {"target": f"{AGENTS}:Swallows", "prompts": 2, "group_size": 2}
    stages = {"grpo": {"grpo": {"async_level": 0}}}
    more.write_text(json.dumps({"agents": agents, "stages": stages}), encoding="utf-8")
    order = ServerOrder("policy", "external", LaunchSpec(""), url=url.removesuffix("/v1"))
    start(order, folder / "server", say=lambda _: None)
    config = ["--config", str(REPOSITORY / "config" / "config.yaml"), str(more)]
    argv = ["agent", "checks", *config, "--endpoint", str(folder / "server"), "--data", str(data)]
    return [*argv, "--out", str(folder), "--episode-timeout", "30"]


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "ids"), [("x", False), ("hang", True)], ids=["direct", "proxy"])
def test_too_few_descriptors_are_the_one_cause_with_the_limit_and_the_remedy(
    tmp_path: Path, wish: str, ids: bool
) -> None:
    rows: list[Row] = [{"texts": [wish]}] * 200
    seconds = "8" if wish == "hang" else "120"
    with wire_server(ids=ids) as server:
        argv = arguments(tmp_path, server.url, rows, "--concurrency", "200")
        running = started([*argv, "--episode-timeout", seconds], limit=64)
        running.wait(PATIENCE)

    verdict, lines = found(tmp_path)
    failed = {line["cause"]: line["detail"] for line in lines if line["cause"]}
    # What reached a server that hangs has its own cause; on a busy machine it reached it late.
    late = {"hanging", "episode_timeout"} if wish == "hang" else set()
    assert failed.keys() - late == {"file_descriptors"}, failed
    assert len(lines) == 200
    (finding,) = [each for each in verdict.findings if each.check == "failed_file_descriptors"]
    assert "may have 64 files" in str(finding.measured)
    assert "ulimit -n" in finding.remedy


@pytest.mark.slow
def test_a_soft_limit_of_descriptors_costs_no_episode(tmp_path: Path) -> None:
    rows: list[Row] = [{"texts": ["hang"], "patience": 5.0}] * 100
    with wire_server() as server:
        argv = arguments(tmp_path, server.url, rows, "--concurrency", "100")
        running = started(argv, limit=64, kind="-Sn")
        running.wait(PATIENCE)

    _, lines = found(tmp_path)
    causes = {line["cause"] for line in lines}
    assert len(lines) == 100
    assert "file_descriptors" not in causes


@pytest.mark.parametrize(
    ("how", "cause", "words"),
    [
        ("exits", "exit", "exit code 3"),
        ("stops_the_loop", "exit", "ended the event loop: RuntimeError"),
        ("exits_in_a_task", "exit", "ended the event loop: SystemExit"),
        ("cancels_itself", "exception", "the agent cancelled the episode's task"),
    ],
)
def test_an_agent_that_ends_its_process_or_task_loses_no_other_episode(
    tmp_path: Path, how: str, cause: str, words: str
) -> None:
    rows: list[Row] = [{"texts": ["x"]}, {"texts": ["x"], "dies": how}, {"texts": ["x"]}]
    with wire_server() as server:
        code = main(arguments(tmp_path, server.url, rows, "--concurrency", "1"))

    _, lines = found(tmp_path)
    assert (code, [line["cause"] for line in lines]) == (1, ["", cause, ""])
    assert words in lines[1]["detail"]


def started(argv: list[str], limit: int = 0, kind: str = "-n") -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "shakedown.cli", *argv]
    limited = ["sh", "-c", f'ulimit {kind} {limit}; exec "$@"', "sh"] if limit else []
    return subprocess.Popen([*limited, *command], env=os.environ | {"OPENAI_API_KEY": "k"})


def ended(folder: Path, check: str = "run") -> int:
    """Good episodes of a check that are written."""
    path = folder / "episodes.jsonl"
    lines = read_episodes(path) if path.exists() else ()
    return sum(line["check"] == check and not line["cause"] for line in lines)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
