"""Faults of agents and of the wire before a real vLLM, and what `shakedown agent` must say.

The truth of each was written before its first run: the statuses that are right, the findings that
must be there, and that no other cause of failure is named.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_relay import Wire, after_probe, at_first, from_the_tenth, some

AGENTS = Path(__file__).with_name("agents_in_trouble.py")
OF_USERS = AGENTS.with_name("agents_of_users.py")


@dataclass(frozen=True)
class Case:
    """A fault and its truth.

    Attributes:
        status: that are right; `refused`: nothing was run, exit code 2.
        named: findings that must be there and not pass, or, where refused, words on the terminal.
        words: that findings must say.
        also: consequences that may be named beside them.
        agent: a class of agents_in_trouble.py, or TARGET as `agent run` takes it.
        good: episodes that must have come through; None: not asked.
        checks: run by `agent checks`, with the options' place taken by `config`, a run's settings;
            no variable of the environment names the server or its key then.
        descriptors: the limit of open files; 0: the shell's.
        interrupt: `by` after so many episodes; 0: never.
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
    by: signal.Signals = signal.SIGINT
    key: str = ""
    words: Sequence[str] = ()
    also: Sequence[str] = ()
    checks: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """As the command takes it."""
        return self.agent if ":" in self.agent else f"{AGENTS}:{self.agent}"


def _kwargs(how: str) -> Sequence[str]:
    return ("--kwargs", json.dumps({"how": how}))


def _checks(
    name: str,
    status: Sequence[str],
    named: Sequence[str] = (),
    agent: str = "Good",
    *,
    grpo: Mapping[str, Any] | None = None,
    **more: Any,
) -> Case:
    """16 episodes at once, whose replies are long enough to be told apart.

    `grpo`: settings of the stage, `agent_kwargs` those of the class.
    """
    settings = {"max_tokens": 48, **(grpo or {})}
    kwargs = settings.pop("agent_kwargs", {})
    agents = {"prompts": 4, "group_size": 4, "episode_timeout": 8.0, "kwargs": kwargs}
    config = {"agents": agents, "stages": {"grpo": {"grpo": settings}}}
    return Case(f"checks: {name}", status, named, agent, checks=True, config=config, **more)


_PASS, _FAIL, _WARN = ("PASS",), ("FAIL",), ("WARN",)
_TEXT = {"agent_kwargs": {"how": "text"}}
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
        Case(
            "a public base URL of its own, swallowed",
            _FAIL,
            ("failed_no_call",),
            f"{OF_USERS}:PublicUrl",
            good=0,
            words=("api.example.invalid:443",),
        ),
        Case(
            "a loop of tool calls without an end",
            _FAIL,
            ("failed_episode_timeout",),
            f"{OF_USERS}:LoopsForEver",
            rows=2,
            good=0,
            words=("calls were answered",),
        ),
        Case(
            "a bug of its own, swallowed as 0.0",
            _WARN,
            ("groups_with_equal_rewards",),
            f"{OF_USERS}:SwallowsItsOwn",
            ("--group-size", "4"),
            good=32,
            words=("all rewards are 0",),
        ),
        Case(
            "stops the event loop",
            _FAIL,
            ("failed_exit",),
            f"{OF_USERS}:StopsTheLoop",
            _ONE_BY_ONE,
            bad_rows=(5,),
            good=7,
        ),
        Case(
            "asyncio.run inside of run",
            _FAIL,
            ("failed_exception",),
            f"{OF_USERS}:RunsALoop",
            good=0,
        ),
        Case(
            "closes the client that its group shares",
            _FAIL,
            ("failed_exception",),
            f"{OF_USERS}:ClosesItsClient",
            ("--group-size", "4"),
            words=("closed",),
        ),
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
            ("UNKNOWN",),
            ("server_gone",),
            "Good",
            ("--concurrency", "2"),
            wire=from_the_tenth("die"),
            rows=32,
            also=("failed_connection", "failed_not_asked"),
        ),
        Case(
            "429, asked again for ever",
            _FAIL,
            ("failed_api_status",),
            f"{OF_USERS}:AsksForEver",
            wire=after_probe("busy"),
            good=0,
            words=("429",),
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
            ("UNKNOWN",),
            ("server",),
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
            ("UNKNOWN", "FAIL"),
            ("stopped",),
            "Slow",
            ("--concurrency", "2"),
            rows=64,
            interrupt=4,
            also=("failed_not_asked",),
        ),
        # The same by `agent checks`.
        _checks("a good agent", _PASS),
        _checks("reads OPENAI_API_KEY when it is imported", _PASS, agent=f"{OF_USERS}:ReadsKey"),
        _checks("returns text", _FAIL, ("single", "failed_bad_return"), "Returns", grpo=_TEXT),
        _checks(
            "stands one episode and not 16",
            _FAIL,
            ("concurrent", "failed_episode_timeout"),
            f"{OF_USERS}:OneAtATime",
        ),
        _checks("history on the class", _FAIL, ("failed_shared_history",), "SharesHistory"),
        _checks(
            "a capacity of nothing",
            ("refused",),
            ("max_concurrent", "nothing can ever start"),
            grpo={"max_concurrent": 1},
        ),
        _checks(
            "SIGTERM in the middle",
            ("UNKNOWN",),
            ("stopped",),
            "Slow",
            interrupt=3,
            by=signal.SIGTERM,
            also=("failed_not_asked",),
        ),
    )
}
