"""Faults of agents and of the wire before a real vLLM, and what `shakedown agent run` must say.

The truth of each was written before its first run: the statuses that are right, the findings that
must be there, and that no other cause of failure is named.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_relay import Relay, Wire, after_probe, at_first, from_the_tenth, some

from shakedown.core.verdict import read_verdict
from shakedown.inference.folder import Endpoint

AGENTS = Path(__file__).with_name("agents_in_trouble.py")
_PATIENCE = 180.0  # seconds that one command may take


@dataclass(frozen=True)
class Case:
    """A fault and its truth.

    Attributes:
        status: that are right; `refused`: nothing was run, exit code 2.
        named: findings that must be there and not pass, or, where refused, words on the terminal.
        also: consequences that may be named beside them.
        agent: a class of agents_in_trouble.py, or TARGET as `agent run` takes it.
        good: episodes that must have come through; None: not asked.
        descriptors: the limit of open files; 0: the shell's.
        interrupt: SIGINT after so many episodes; 0: never.
        key: another than the server's.
    """

    name: str
    status: Sequence[str]
    named: Sequence[str] = ()
    agent: str = "Good"
    options: Sequence[str] = ()
    wire: Wire | None = None
    good: int | None = None
    rows: int = 8
    bad_rows: Sequence[int] = ()
    descriptors: int = 0
    interrupt: int = 0
    key: str = ""
    also: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """What the command said. `named`: findings that do not pass; where refused, its last words."""

    status: str
    named: Sequence[str]
    good: int = 0
    kept: int = 0
    code: int = 0
    seconds: float = 0.0
    summary: str = ""

    def is_right(self, case: Case) -> bool:
        if self.status not in case.status:
            return False
        if self.status == "refused":
            return all(words in self.summary for words in case.named)
        causes = {
            each for each in self.named if each.startswith("failed_") and each != "failed_calls"
        }
        others = causes - {*case.named, *case.also}
        found = set(case.named) <= set(self.named)
        enough = case.good is None or self.good == case.good
        stopped = not case.interrupt or (self.code == 130 and self.kept >= case.interrupt)
        return found and not others and enough and stopped


def ran(case: Case, endpoint: Endpoint, root: Path) -> Outcome:
    """Run the command in a process of its own."""
    out = root / case.name.replace(" ", "-").replace("/", "-")
    rows = root / f"{out.name}.jsonl"
    rows.write_text("".join(_row(case, number) for number in range(case.rows)), encoding="utf-8")
    if case.wire is None:
        return _command(case, endpoint, endpoint.base_url, rows, out)
    with Relay(endpoint.base_url, case.wire).serving() as url:
        return _command(case, endpoint, url, rows, out)


def _row(case: Case, number: int) -> str:
    content = f"{number % 10}{number % 7}+{number % 9}4="
    row: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    return json.dumps(row | ({"bad": True} if number in case.bad_rows else {})) + "\n"


def _command(case: Case, endpoint: Endpoint, url: str, rows: Path, out: Path) -> Outcome:
    target = case.agent if ":" in case.agent else f"{AGENTS}:{case.agent}"
    words = [sys.executable, "-m", "shakedown.cli", "agent", "run", target, "--data", str(rows)]
    words += ["--base-url", url, "--out", str(out), "--episode-timeout", "8", *case.options]
    key = case.key or endpoint.api_key()
    began = time.monotonic()
    running = subprocess.Popen(
        words,
        env={**os.environ, "OPENAI_API_KEY": key, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_limited(case.descriptors),  # noqa: PLW1509 - no threads but the relay's
    )
    if case.interrupt:
        _wait_for(lambda: _kept(out) >= case.interrupt, running)
        running.send_signal(signal.SIGINT)
    try:
        said, _ = running.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return Outcome("did not end", (), seconds=_PATIENCE)
    finally:
        running.kill()
    seconds = time.monotonic() - began
    if not (out / "verdict.json").is_file():
        status = "refused" if running.returncode == 2 else f"exit {running.returncode}"
        return Outcome(status, (), code=running.returncode, seconds=seconds, summary=said[-1_000:])
    verdict = read_verdict(out / "verdict.json")
    return Outcome(
        verdict.status,
        [each.check for each in verdict.findings if each.status not in ("pass", "skip")],
        int(verdict.metrics.get("episodes_ok", 0)),
        _kept(out),
        running.returncode,
        seconds,
        verdict.summary,
    )


def _limited(descriptors: int) -> Callable[[], None] | None:
    if not descriptors:
        return None
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


def _kept(out: Path) -> int:
    path = out / "episodes.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def _wait_for(ready: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _PATIENCE
    while not ready() and running.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def _kwargs(how: str) -> Sequence[str]:
    return ("--kwargs", json.dumps({"how": how}))


_PASS, _FAIL, _WARN = ("PASS",), ("FAIL",), ("WARN",)
_MANY = ("--concurrency", "512", "--group-size", "8")
_ONE_BY_ONE = ("--concurrency", "1")

CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        # Nothing is wrong with these.
        Case("a good agent", _PASS, good=8),
        Case("a good agent, 512 at once", _PASS, options=_MANY, rows=64, good=512),
        Case("an agent of Anthropic's client", _PASS, agent="Anthropic", good=8),
        Case("an agent of streamed responses", _PASS, agent="Responses", good=8),
        Case("three streamed turns", _PASS, agent="Turns", good=8),
        Case("slow between its calls", _PASS, agent="Slow", good=8),
        Case("names another model", _PASS, agent="NamesAnotherModel", good=8),
        Case("changes its row", _PASS, agent="Mutates", options=("--group-size", "4"), good=32),
        Case("prints a megabyte an episode", _PASS, agent="Prints", good=8),
        # The agent.
        Case("asks nobody", _FAIL, ("failed_no_call",), "NoCall", good=0),
        Case("never awaits its call", _FAIL, ("failed_no_call",), "NeverAwaits", good=0),
        Case("a path that answers 404, swallowed", _FAIL, ("failed_api_status",), "WrongPath"),
        Case("another server", _FAIL, ("failed_connection",), "Elsewhere"),
        Case("a synchronous client, many", _WARN, ("blocking_client",), "Synchronous", good=8),
        Case(
            "a synchronous client, one episode",
            _WARN,
            ("blocking_client",),
            "Synchronous",
            ("--limit", "1"),
            good=1,
        ),
        Case("time.sleep", _FAIL, ("failed_blocked_loop",), "Sleeps", _ONE_BY_ONE, rows=2),
        Case("an endless loop", _FAIL, ("failed_blocked_loop",), "Spins", _ONE_BY_ONE, rows=2),
        Case("too long", _FAIL, ("failed_episode_timeout",), "Late"),
        Case(
            "history on the class", _FAIL, ("failed_shared_history",), "SharesHistory", _ONE_BY_ONE
        ),
        Case(
            "a session of the module",
            _FAIL,
            ("failed_shared_history",),
            "SharesSession",
            _ONE_BY_ONE,
        ),
        *(
            Case(f"returns {how}", _FAIL, ("failed_bad_return",), "Returns", _kwargs(how), good=0)
            for how in ("none", "bool", "nan", "text", "list", "unknown id")
        ),
        Case(
            "raises for one row",
            _FAIL,
            ("failed_exception",),
            "RaisesForOne",
            bad_rows=(5,),
            good=7,
        ),
        *(
            Case(
                f"ends its process: {how}",
                _FAIL,
                ("failed_exit",),
                "Ends",
                (*_kwargs(how), *_ONE_BY_ONE),
                bad_rows=(5,),
                good=7,
            )
            for how in ("_exit", "exit", "segmentation fault")
        ),
        *(
            Case(f"forces {how}", _FAIL, ("failed_api_status",), "Forces", _kwargs(how), good=0)
            for how in ("json", "tool", "image")
        ),
        Case("a prompt that is too long", _FAIL, ("failed_api_status",), "Forces", _kwargs("long")),
        Case(
            "equal rewards in every group",
            _WARN,
            ("groups_with_equal_rewards",),
            "Equal",
            ("--group-size", "4"),
            good=32,
        ),
        Case("a breakpoint left in", _FAIL, ("failed_exception",), "Breakpoint", rows=2),
        # Refused before an episode is run.
        Case("run is not async", ("refused",), ("async def run",), "NotAsync"),
        Case(
            "a wrong argument", ("refused",), ("hwo", "how: str"), "Returns", ("--kwargs", "hwo=1")
        ),
        Case("no class of that name", ("refused",), ("did you mean",), "Godo"),
        Case("no file of that name", ("refused",), ("no file",), "no_such_agent.py:Agent"),
        # The wire, behind the recording proxy.
        Case(
            "the server fails, swallowed",
            _FAIL,
            ("failed_api_status",),
            "Swallows",
            wire=after_probe("error"),
            good=0,
        ),
        Case(
            "a third of the calls fail, asked again",
            _WARN,
            ("failed_calls",),
            "AsksTwice",
            wire=some("error"),
            good=8,
        ),
        Case(
            "HTML with status 200",
            _FAIL,
            ("failed_bad_reply",),
            "Swallows",
            wire=after_probe("html"),
            good=0,
        ),
        Case(
            "bodies without their end",
            _FAIL,
            ("failed_truncated",),
            "Swallows",
            wire=after_probe("cut"),
            good=0,
        ),
        Case(
            "streams without their end",
            _FAIL,
            ("failed_truncated",),
            "Streams",
            wire=after_probe("cut"),
            good=0,
        ),
        Case(
            "connections that are reset",
            _FAIL,
            ("failed_connection",),
            "Swallows",
            wire=after_probe("reset"),
            good=0,
        ),
        Case(
            "a server that never answers",
            _FAIL,
            ("failed_hanging",),
            "Swallows",
            wire=after_probe("hang"),
            good=0,
        ),
        Case(
            "the server dies in the middle",
            ("BLOCKED",),
            ("server_gone",),
            "Good",
            ("--concurrency", "2"),
            wire=from_the_tenth("die"),
            rows=32,
            also=("failed_connection", "failed_not_asked"),
        ),
        # The wire, where agents talk to the server itself.
        Case(
            "the server fails from the start",
            _FAIL,
            ("failed_api_status",),
            "Swallows",
            wire=at_first("error"),
            good=0,
        ),
        Case(
            "HTML from the start",
            _FAIL,
            ("failed_bad_reply",),
            "Swallows",
            wire=at_first("html"),
            good=0,
        ),
        Case(
            "bodies cut from the start",
            _FAIL,
            ("failed_truncated",),
            "Swallows",
            wire=at_first("cut"),
            good=0,
        ),
        Case(
            "a key that the server refuses",
            _FAIL,
            ("failed_api_status",),
            "Swallows",
            key="wrong",
            good=0,
        ),
        # The machine and the user.
        Case(
            "64 file descriptors for 512 episodes",
            _FAIL,
            ("failed_file_descriptors",),
            "Swallows",
            _MANY,
            rows=64,
            descriptors=64,
        ),
        Case(
            "Ctrl-C in the middle",
            ("BLOCKED", "FAIL"),
            ("stopped",),
            "Slow",
            ("--concurrency", "2"),
            rows=64,
            interrupt=4,
            also=("failed_not_asked",),
        ),
    )
}
