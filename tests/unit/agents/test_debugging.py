"""breakpoint() in an agent stands until somebody lets it go on, and no time-out ends it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shakedown.agents.episode_lines import read_episodes
from shakedown.cli import main
from shakedown.core.verdict import read_verdict
from shakedown.debug import debug_settings
from shakedown.debug.paused_processes import PausedProcess, let_go, read_stops
from shakedown.debug.protocol import DapSender, read_message

AGENT = '''"""Stands or raises as its row says."""
class Agent:
    async def run(self, data, **extra):
        secret = data["number"] * 7
        if data["number"] == 2:
            breakpoint()
        if data["number"] == 3:
            raise ValueError("three")
        return float(secret)
'''
OWN = """
import debugpy, pathlib, time

class Agent:
    async def run(self, data, **extra):
        _, port = debugpy.listen(("127.0.0.1", 0), in_process_debug_adapter=True)
        pathlib.Path(data["port"]).write_text(str(port))
        debugpy.wait_for_client()
        time.sleep(14)
        return 1.0
"""


PATIENCE = 300  # seconds, on a machine with much other work
Row = dict[str, Any]
NUMBERS: list[Row] = [{"number": 1}, {"number": 2}, {"number": 3}]


@contextlib.contextmanager
def running(
    folder: Path, *options: str, agent: str = AGENT, rows: Sequence[Row] = NUMBERS
) -> Iterator[subprocess.Popen[str]]:
    """`agent run` with a time-out of a second."""
    (folder / "agent.py").write_text(agent, encoding="utf-8")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    argv = [sys.executable, "-m", "shakedown.cli", "agent", "run", f"{folder}/agent.py:Agent"]
    argv += ["--data", f"{folder}/rows.jsonl", "--episode-timeout", "1", "--out", f"{folder}/out"]
    process = subprocess.Popen(
        [*argv, *options],
        env={name: value for name, value in os.environ.items() if name != "OPENAI_BASE_URL"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def standing(
    folder: Path, process: subprocess.Popen[str], fits: Callable[[PausedProcess], bool]
) -> PausedProcess:
    while True:
        stops = read_stops(folder / "out" / "debug")
        if found := [stop for stop in stops if fits(stop)]:
            return found[0]
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.slow
def test_an_agent_stands_at_its_breakpoint_and_at_exceptions_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with running(tmp_path, "--debug", "--concurrency", "1") as process:
        stop = standing(tmp_path, process, lambda stop: stop.reason == "breakpoint")
        time.sleep(3)  # three times what an episode may take
        main(["debug", "attach", str(out), "--launch", str(tmp_path / "launch.json")])
        listed = capsys.readouterr().out
        main(["debug", "attach", str(out), "--continue", "all"])
        raised = standing(tmp_path, process, lambda stop: stop.reason == "exception")
        let_go(out / "debug", [raised])
        said, _ = process.communicate(timeout=PATIENCE)

    assert (stop.role, stop.function, stop.line) == ("agent", "run", 6)
    assert f"agent {stop.pid} on " in listed
    assert "at a breakpoint" in listed
    assert "ValueError: three" in raised.detail
    assert f"shakedown debug attach {out}" in said
    lines = read_episodes(out / "episodes.jsonl")
    # `no_call`: run has returned a reward.
    ends = {line["row"]: line["cause"] for line in lines}
    assert ends == {0: "no_call", 1: "no_call", 2: "exception"}
    # The time that a person takes is no lag of the agent's loop.
    assert read_verdict(out / "verdict.json").metrics["loop_lag_max_seconds"] == 0


@pytest.mark.slow
def test_a_debugger_that_an_agent_starts_itself_holds_its_worker(tmp_path: Path) -> None:
    told = tmp_path / "port"
    # Within this time a client has to come.
    with running(tmp_path, "--episode-timeout", "12", agent=OWN, rows=[{"port": str(told)}]) as run:
        while not (told.is_file() and told.read_text(encoding="utf-8")):
            assert run.poll() is None
            time.sleep(0.05)
        port = int(told.read_text(encoding="utf-8"))
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            stream, sender = connection.makefile("rb"), DapSender(connection.sendall)
            for number, command in enumerate(("initialize", "attach", "configurationDone"), 1):
                arguments = {"adapterID": "debugpy", "clientID": "test"}
                message = {"seq": number, "type": "request", "command": command}
                sender.send(message | {"arguments": arguments})
                if command == "attach":  # answered after configurationDone
                    while (read_message(stream) or {}).get("event") != "initialized":
                        pass
            run.communicate(timeout=PATIENCE)

    (line,) = read_episodes(tmp_path / "out" / "episodes.jsonl")
    assert line["cause"] == "no_call"  # run has returned a reward
    assert line["seconds"] > 14  # it slept so long


@pytest.mark.slow
def test_a_line_stops_without_a_change_of_the_file(tmp_path: Path) -> None:
    place = f"{tmp_path}/agent.py:7"
    with running(tmp_path, "--row", "0", "--break-at", place) as process:
        stop = standing(tmp_path, process, lambda _: True)
        let_go(tmp_path / "out" / "debug", [stop])
        process.communicate(timeout=PATIENCE)

    assert (Path(stop.file).name, stop.line) == ("agent.py", 7)
    (line,) = read_episodes(tmp_path / "out" / "episodes.jsonl")
    assert line["cause"] == "no_call"  # run has returned a reward


def test_a_place_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    with running(tmp_path, "--break-at", "agent.py") as process:
        said, _ = process.communicate(timeout=PATIENCE)

    assert process.returncode == 2
    assert "FILE:LINE" in said


# In a process of its own: a monitor watches its process for as long as that lives.
UNKNOWN = """
import asyncio, sys, time
from shakedown.agents.endpoint import EPISODE_KEY
from shakedown.agents.event_loop_lag import LoopMonitor

async def block():
    monitor = LoopMonitor(limit=0.2, held=lambda: sys.argv[1] == "held")
    monitor.start()
    await asyncio.sleep(0.1)
    EPISODE_KEY.set("an episode")
    time.sleep(1)
    print(monitor.blocked_at)

asyncio.run(block())
"""


@pytest.mark.parametrize(("state", "said"), [("held", "{}"), ("free", "blocked the event loop")])
def test_a_loop_that_a_debugger_holds_is_not_interrupted(state: str, said: str) -> None:
    argv = [sys.executable, "-c", UNKNOWN, state]

    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE)

    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == (state == "held")


def test_a_trace_function_is_no_debugger_and_debugpy_with_a_client_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Debugpy:
        connected = False

        def is_client_connected(self) -> bool:
            return self.connected

    debugpy = Debugpy()
    monkeypatch.setitem(sys.modules, "debugpy", debugpy)
    before = debug_settings.is_held()
    debugpy.connected = True

    assert (before, debug_settings.is_held()) == (False, True)
