"""A real process that stands: who gets in, what is read, how it goes on."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from shakedown.core.errors import CannotJudgeError
from shakedown.debug import debug_settings
from shakedown.debug.debugger_client import DebugClient
from shakedown.debug.paused_processes import (
    PausedProcess,
    PauseFile,
    let_go,
    make_folder,
    read_stops,
)
from shakedown.debug.protocol import DapSender, read_message
from shakedown.debug.terminal import Terminal
from tests.command import shakedown
from tests.ssh_hosts import SSHD, private_hosts

PROGRAM = """
import library, sys

def work(turns):
    total = 0
    for turn in range(turns):
        secret = turn * 7
        breakpoint()
        total += secret
    return total

print("total", work(int(sys.argv[1])), flush=True)
print("sum", library.add(1, 2), flush=True)
raise ValueError("the end")
"""
LIBRARY = '''"""Adds."""

def add(first, second):
    # breaks before the next line
    both = first + second
    return both
'''
SSH_W = """
import os, socket, sys, threading
host, port = sys.argv[sys.argv.index("-W") + 1].split(":")
assert sys.argv[-1] == "far"
there = socket.create_connection((host, int(port)))
def back():
    while data := there.recv(65536):
        os.write(1, data)
threading.Thread(target=back, daemon=True).start()
while data := os.read(0, 65536):
    there.sendall(data)
"""
AFTER_BREAKPOINT = 8  # the line that a debugger stops at


class Debugged:
    """The program under `--debug --break-at library.py:4`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stops_folder = folder, folder / "debug"
        make_folder(self.stops_folder)
        (folder / "program.py").write_text(PROGRAM.lstrip("\n"), encoding="utf-8")
        (folder / "library.py").write_text(LIBRARY, encoding="utf-8")
        self.process: subprocess.Popen[str] | None = None

    def start(self, turns: int) -> None:
        environment = debug_settings.environment(self.stops_folder, "trainer")
        environment |= {"SHAKEDOWN_DEBUG": f"{self.folder}/library.py:4", "RANK": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(self.folder / "program.py"), str(turns)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop(self, fits: Callable[[PausedProcess], bool] = lambda _: True) -> PausedProcess:
        """Wait until the process stands."""
        deadline = time.monotonic() + 60
        while True:
            if found := [stop for stop in read_stops(self.stops_folder) if fits(stop)]:
                return found[0]
            assert self.process is not None
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> tuple[str, str]:
        """Let the process go on to its end: its output and its errors."""
        assert self.process is not None
        while self.process.poll() is None:
            let_go(self.stops_folder, read_stops(self.stops_folder))
            time.sleep(0.2)
        return self.process.communicate()


@pytest.fixture
def debugged(tmp_path: Path) -> Iterator[Debugged]:
    made = Debugged(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate()


def top(debugger: DebugClient, stopped: dict[str, Any]) -> tuple[str, int]:
    frame = debugger.request("stackTrace", {"threadId": stopped["threadId"]})["stackFrames"][0]
    return Path(frame["source"]["path"]).name, frame["line"]


def evaluate(debugger: DebugClient, stopped: dict[str, Any], text: str) -> str:
    frame = debugger.request("stackTrace", {"threadId": stopped["threadId"]})["stackFrames"][0]
    arguments = {"expression": text, "frameId": frame["id"], "context": "repl"}
    return str(debugger.request("evaluate", arguments)["result"])


def listening(pid: int) -> list[tuple[str, int]]:
    found = psutil.Process(pid).net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def refused(port: int, *messages: dict[str, Any]) -> dict[str, Any] | None:
    """The last answer to a stranger who sends these; None: the connection was closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        stream, sender = connection.makefile("rb"), DapSender(connection.sendall)
        answer = None
        for message in messages:
            sender.send(message)
            answer = read_message(stream)
        if answer is not None:
            assert read_message(stream) is None
        return answer


def test_breakpoints_lines_and_exceptions_stop_and_nothing_else_listens(
    debugged: Debugged,
) -> None:
    debugged.start(turns=1)

    first = debugged.stop()
    ports = listening(first.pid)
    let_go(debugged.stops_folder, [first])
    line = debugged.stop(lambda stop: stop.file.endswith("library.py"))
    let_go(debugged.stops_folder, [line])
    last = debugged.stop(lambda stop: stop.reason == "exception")
    output, errors = debugged.end()

    assert (first.name, Path(first.file).name, first.line) == ("trainer-rank1", "program.py", 7)
    assert ports == [("127.0.0.1", first.port)]
    assert (line.line, line.function) == (5, "add")
    assert (last.detail, last.line) == ("ValueError: the end", 13)
    assert output == "total 0\nsum 3\n"
    assert "ValueError: the end" in errors
    assert list(debugged.stops_folder.iterdir()) == []


def test_without_the_token_nobody_gets_in_and_debugpy_is_not_even_loaded(
    debugged: Debugged,
) -> None:
    debugged.start(turns=1)
    stop = debugged.stop()
    first = {"type": "request", "seq": 1, "command": "initialize", "arguments": {}}
    attach = {"type": "request", "seq": 2, "command": "attach", "arguments": {}}
    guess = {**attach, "arguments": {"shakedownToken": "\ud800guess"}}
    run = {"type": "request", "seq": 2, "command": "evaluate", "arguments": {"expression": "1"}}

    answers = [refused(stop.port, first, second) for second in (attach, guess, run)]
    at_once = refused(stop.port, {**run, "seq": 1})
    login = refused(stop.port, {"type": "request", "seq": 1, "command": "pydevdAuthorize"})

    assert [answer and answer["success"] for answer in answers] == [False] * 3
    assert all(answer and "shakedownToken" in answer["message"] for answer in answers)
    assert (at_once, login) == (None, None)
    with (
        pytest.raises(CannotJudgeError, match="shakedownToken"),
        DebugClient(replace(stop, token=stop.token[:-1])) as stranger,
    ):
        stranger.attach()
    assert not [m for m in psutil.Process(stop.pid).memory_maps() if "pydevd" in m.path]
    assert debugged.stop() == stop


@pytest.mark.slow
def test_a_stranger_who_never_ends_a_message_is_cut_off(debugged: Debugged) -> None:
    debugged.start(turns=1)
    began = time.monotonic()

    address = ("127.0.0.1", debugged.stop().port)
    with socket.create_connection(address) as connection, contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 60:
            connection.sendall(b"C")
            time.sleep(0.5)

    assert time.monotonic() - began < 30


def test_a_debugger_reads_steps_and_lets_go_and_a_second_one_can_come_later(
    debugged: Debugged,
) -> None:
    debugged.start(turns=3)

    with DebugClient(debugged.stop()) as debugger:
        stopped = debugger.attach()
        places = [top(debugger, stopped)]
        values = [evaluate(debugger, stopped, "secret")]
        ports = listening(debugged.stop().pid)
        with (
            pytest.raises(CannotJudgeError, match="another debugger"),
            DebugClient(debugged.stop()) as other,
        ):
            other.attach()
        thread = {"threadId": stopped["threadId"]}
        debugger.request("next", thread)
        places.append(top(debugger, debugger.event("stopped")))
        debugger.request("continue", thread)
        stopped = debugger.event("stopped")
        values.append(evaluate(debugger, stopped, "secret"))
    # The connection is lost, as of a laptop that sleeps: the process stands on.
    left = debugged.stop(lambda stop: not stop.attached)
    with DebugClient(left) as debugger:
        stopped = debugger.attach()
        evaluate(debugger, stopped, "total = 1000")
        debugger.request("disconnect", {})
    later = debugged.stop(lambda stop: stop.reason == "breakpoint")
    output, _ = debugged.end()

    assert places == [("program.py", AFTER_BREAKPOINT), ("program.py", 5)]
    assert values == ["0", "7"]
    assert len(ports) == 1
    assert (left.reason, left.line) == ("debugger", AFTER_BREAKPOINT)
    assert later.line == AFTER_BREAKPOINT - 1
    assert "sum 3" in output


def test_an_exception_is_looked_at_where_it_was_raised(debugged: Debugged) -> None:
    debugged.start(turns=0)
    let_go(debugged.stops_folder, [debugged.stop()])

    with DebugClient(debugged.stop(lambda stop: stop.reason == "exception")) as debugger:
        stopped = debugger.attach()
        place = top(debugger, stopped)
        debugger.request("disconnect", {})
    _, errors = debugged.end()

    assert stopped["reason"] == "exception"
    assert place == ("program.py", 13)
    assert errors.rstrip().endswith("ValueError: the end")


def test_the_terminal_prints_steps_and_leaves_the_process_standing(debugged: Debugged) -> None:
    debugged.start(turns=2)
    commands = iter(
        [
            "p secret + 1",
            "!total = 500",
            "a",
            "list",
            "bt",
            "p nonsense",
            "continue",
            "p total",
            "q",
        ]
    )
    said: list[str] = []

    with DebugClient(debugged.stop()) as client:
        Terminal(client, lambda _: next(commands), said.append).run()
    stop = debugged.stop(lambda stop: not stop.attached)
    output, _ = debugged.end()

    place = f"{debugged.folder}/program.py:{AFTER_BREAKPOINT} in work"
    assert said[:2] == ["breakpoint", place]
    assert said[2] == "1"
    assert "secret = 0" in said
    assert f">{AFTER_BREAKPOINT:5}         total += secret" in said
    assert f"> {place}" in said
    assert any("NameError" in line for line in said)
    assert said[-1] == "500"
    assert stop.line == AFTER_BREAKPOINT
    assert output.startswith("total 507\n")


def turns_from_elsewhere(stop: PausedProcess) -> str:
    """The variable `turns`, read as if the process were on the node `far`."""
    with DebugClient(replace(stop, host="far.site", node="far")) as debugger:
        value = evaluate(debugger, debugger.attach(), "turns")
        debugger.request("disconnect", {})
    return value


@pytest.mark.skipif(SSHD is None, reason="needs sshd (openssh-server)")
def test_another_node_is_reached_by_ssh(
    debugged: Debugged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debugged.start(turns=1)
    (tmp_path / "ssh").mkdir()
    with private_hosts(tmp_path / "ssh") as hosts:
        hosts.start("far")
        monkeypatch.setenv("PATH", f"{hosts.bin}{os.pathsep}{os.environ['PATH']}")
        assert turns_from_elsewhere(debugged.stop()) == "1"


def test_the_protocol_goes_through_what_ssh_w_connects(
    debugged: Debugged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ssh -W HOST:PORT NODE`, as ssh(1) has it, by a stand-in: also where there is no sshd."""
    (tmp_path / "ssh").write_text(f"#!{sys.executable}\n{SSH_W}", encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    debugged.start(turns=1)

    assert turns_from_elsewhere(debugged.stop()) == "1"


def test_continue_lets_the_chosen_process_go_on(debugged: Debugged) -> None:
    debugged.start(turns=1)
    first = debugged.stop()
    attempt = debugged.folder

    done = shakedown("debug", "attach", attempt, "--continue", "1")

    second = debugged.stop()
    assert done.returncode == 0, done.stderr
    assert "1 process(es) resumed" in done.stdout
    assert (first.line, second.line) == (7, 5)
    assert not PauseFile(debugged.stops_folder, first.node, first.pid).told_to_continue()
