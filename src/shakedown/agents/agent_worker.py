"""A process that runs episodes of one agent class: `python -m shakedown.agents.agent_worker`.

Reads JSON lines from standard input, the first one an order, then episodes:

    {"target": T, "seconds": S, "host": H, "port": P, "model": M}  -> {} or {"fault": TEXT}
    {"key": K, "base_url": U, "data": {...}}     -> later, in any order: {"key": K, "reward": R} or
                                                    {"key": K, "cause": C, "detail": D, "trace": T}

`{"alive": true}` says every second that the event loop turns. All episodes share the loop, as in
`shakedown agent run`: clients and locks that a module makes once work. An episode's clock is the
loop's: while another one blocks the loop it stands still, and the one that blocks is ended by a
signal. What agents print goes to standard error.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from shakedown.agents.causes import classify
from shakedown.agents.contract import AgentExitError, accepts_model, judge_return, load_agent
from shakedown.agents.episode_tag import EPISODE_KEY, tagged
from shakedown.agents.looplag import LoopMonitor
from shakedown.agents.runner import AgentEndpoint, environment, shared_client
from shakedown.agents.wire import CURRENT_EPISODE, Wire
from shakedown.core.errors import ShakedownError

ALIVE_SECONDS = 1.0
LONGEST_LINE = 1 << 26  # bytes: a row of data with its images
_TICK = 0.1
_MOST_COUNTED = 1.0  # seconds of one turn of the loop; the rest is another episode's fault
_LONGEST_TRACE = 4000
_CONNECTIONS = 1024
# Sent to a whole stage: its trainer still finishes the step in work. Workers end with their parent.
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class _Running:
    task: "asyncio.Task[Any]"
    seconds: float = 0.0


class _Replies:
    """One JSON object a line, whole."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")

    def say(self, **reply: Any) -> None:
        try:
            self._stream.write(json.dumps(reply) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            os._exit(0)  # nobody is left to hear


class Host:
    """Runs episodes until standard input ends."""

    def __init__(self, agent: type, order: dict[str, Any], replies: _Replies) -> None:
        self._agent, self._order, self._replies = agent, order, replies
        module = sys.modules.get(agent.__module__)
        self._file = getattr(module, "__file__", None) or ""
        self._running: dict[str, _Running] = {}
        self._client: Any = None
        self._wire, self._monitor = Wire(), LoopMonitor(limit=float(order["seconds"]))
        self._count = 0

    async def serve(self, orders: int) -> None:
        """Start every episode that is read from the descriptor `orders`."""
        order = self._order
        root = f"http://{order['host']}:{order['port']}/v1"
        lines = asyncio.StreamReader(limit=LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(orders, "rb", buffering=0)
        )
        with (
            environment(AgentEndpoint(root, "None", order["model"])),
            tagged(order["host"], int(order["port"])),
            self._wire.open(),
        ):
            self._client = shared_client(_CONNECTIONS)
            async with self._monitor:
                clock = asyncio.create_task(self._clock())
                async for line in lines:
                    self._start(json.loads(line))
                clock.cancel()

    def _start(self, episode: dict[str, Any]) -> None:
        key, self._count = episode["key"], self._count + 1
        task = asyncio.create_task(self._run(episode, self._count))
        self._running[key] = _Running(task)
        task.add_done_callback(lambda done: self._ended(key, done))

    async def _run(self, episode: dict[str, Any], number: int) -> Any:
        CURRENT_EPISODE.set(number)
        EPISODE_KEY.set(episode["key"])
        kwargs = {
            "base_url": episode["base_url"],
            "api_key": episode["key"],
            "http_client": self._client,
        }
        if accepts_model(self._agent):
            kwargs["model"] = self._order["model"]
        try:
            return judge_return(await self._agent().run(episode["data"], **kwargs))
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio lets both end the whole loop, with every other episode in it.
            raise AgentExitError(f"the agent raised {type(error).__name__}: {error}") from error

    def _ended(self, key: str, task: "asyncio.Task[Any]") -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._running.pop(key, None) is None:
            return  # its time had run out: that was told
        if error is None:
            self._replies.say(key=key, reward=task.result())
            return
        cause, detail = classify(error, self._file)
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACE:]
        self._replies.say(key=key, cause=cause, detail=detail, trace=trace)

    async def _clock(self) -> None:
        """Count each episode's time, end those whose time is over, and say that all is alive."""
        said = before = time.monotonic()
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            spent, before = min(now - before, _MOST_COUNTED), now
            for key, running in list(self._running.items()):
                running.seconds += spent
                if running.seconds > self._monitor.limit:
                    self._expire(key)
            if now - said >= ALIVE_SECONDS:
                said = now
                self._replies.say(alive=True)
                # Measurements for `agent run`; a stage may run for days.
                self._monitor.lags.clear()
                self._wire.exchanges.clear()

    def _expire(self, key: str) -> None:
        """Tell it at once; a task that ignores its cancellation is left behind, unheard."""
        running = self._running.pop(key)
        running.task.cancel()
        detail = f"no result after {self._monitor.limit:g} s"
        self._replies.say(key=key, cause="episode_timeout", detail=detail, trace="")


def main() -> int:
    """Serve until standard input ends or the parent is gone."""
    for number in _NOT_FOR_US:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: that would pass to children
    orders, replies = os.dup(0), _Replies(os.dup(1))
    _close_standard_streams()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    order = json.loads(_first_line(orders) or b"null")
    if order is None:
        return 0
    try:
        agent = load_agent(order["target"])
    except ShakedownError as error:
        replies.say(fault=str(error))
        return int(error.exit_code)
    replies.say()
    asyncio.run(_until_the_end(Host(agent, order, replies), orders))
    return 0


async def _until_the_end(host: Host, orders: int) -> None:
    await host.serve(orders)
    os._exit(0)  # tasks and threads of agents must not hold the process


def _first_line(descriptor: int) -> bytes:
    """Byte by byte: what follows belongs to the event loop's reader."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _end_with(parent: int) -> None:
    """Also while an agent blocks the event loop, which then sees no end of its input."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _close_standard_streams() -> None:
    """An agent that prints or reads must not spoil the talk."""
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
