"""Agents in worker processes: code that blocks, loops or exits cannot starve who waits for it.

    async with AgentPool(AgentOrder("my/agent.py:MyAgent", "127.0.0.1", 8000, "policy")) as pool:
        result = await pool.run("key-1", "http://127.0.0.1:8000/e/key-1/v1", '{"messages": []}')

Episodes are spread over the workers; all of one worker share its event loop. A worker that ends,
or that is silent because something blocks it outside of Python, costs the episodes it has.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

from shakedown.agents.agent_worker import ALIVE_SECONDS, LONGEST_LINE
from shakedown.agents.contract import Reward
from shakedown.agents.worker_process import WorkerProcess, start_worker
from shakedown.core.errors import UsageError

_START_SECONDS = 120.0  # of Python and the agent's imports, on a busy machine
_SILENCE_SECONDS = 10.0 + ALIVE_SECONDS  # beyond what an episode may take
_END_SECONDS = 2.0


@dataclass(frozen=True)
class AgentOrder:
    """What every worker is told.

    `target`: as `shakedown agent run` takes it. `host`, `port`: of the server that agents are to
    ask, `model`: its model's name. `seconds`: that an episode may take.
    """

    target: str
    host: str
    port: int
    model: str
    seconds: float = 120.0


@dataclass(frozen=True)
class AgentResult:
    """What became of one call of `run`.

    `cause` is empty when it went well, else a key of `causes.CAUSES`; `trace` is the traceback of
    an exception in the agent. `seconds`: wall time.
    """

    reward: Reward | None = None
    cause: str = ""
    detail: str = ""
    trace: str = ""
    seconds: float = 0.0


class AgentPool:
    """Runs one agent class in processes of its own. Use it on one event loop.

    Args:
        order: what to run.
        workers: processes at most, by default a quarter of the CPU cores, 2 to 16; the first is
            started at once, the others when there is more than one episode to run.
    """

    def __init__(self, order: AgentOrder, *, workers: int | None = None) -> None:
        self._order = order
        self._most = workers or min(16, max(2, len(os.sched_getaffinity(0)) // 4))
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start the first worker: what cannot be imported is known before anything else starts.

        Raises:
            UsageError: no such class, or one that is no agent.
            LaunchError: a process could not be started.
        """
        await self._chosen()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.gather(*(worker.end() for worker in self._workers))
        self._workers.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        return sorted(worker.pid for worker in self._workers if worker.alive)

    async def run(self, key: str, base_url: str, data: str) -> AgentResult:
        """Run one episode; every outcome, a failure too, is a result.

        Args:
            key: names the episode; given to the agent as `api_key`.
            base_url: given to the agent.
            data: one row as JSON.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        worker = await self._chosen()
        return await worker.run(key, base_url, data)

    async def _chosen(self) -> "_Worker":
        """The worker with the fewest episodes; a new one while there may be more."""
        async with self._starting:
            for worker in [each for each in self._workers if not each.alive]:
                self._workers.remove(worker)
                await worker.end()
            least = min(self._workers, key=lambda worker: worker.load, default=None)
            if least is None or (least.load and len(self._workers) < self._most):
                least = await _Worker.start(self._order)
                self._workers.append(least)
            return least


class _Worker:
    """One process and the episodes it has."""

    def __init__(self, started: WorkerProcess) -> None:
        self._process, self._orders = started.process, started.orders
        self._replies = started.replies
        self._waiting: dict[str, asyncio.Future[AgentResult]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.alive = True

    @classmethod
    async def start(cls, order: AgentOrder) -> Self:
        """Start a process and let it import the agent.

        Raises:
            UsageError: it cannot be imported or is no agent, or ends or loops on the way.
            LaunchError: the process could not be started.
        """
        worker = cls(
            await start_worker(
                "shakedown.agents.agent_worker", name="an agent worker", longest_line=LONGEST_LINE
            )
        )
        try:
            await worker._prepare(order)
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> int:
        """Episodes that it has."""
        return len(self._waiting)

    async def run(self, key: str, base_url: str, data: str) -> AgentResult:
        """Hand an episode over and wait for what becomes of it."""
        future: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._waiting[key], began = future, time.monotonic()
        head = json.dumps({"key": key, "base_url": base_url})
        try:
            with contextlib.suppress(ConnectionError):  # it has ended: its reader says how
                self._orders.write(f'{head[:-1]}, "data": {data}}}\n'.encode())
                await self._orders.drain()
            result = await future
        finally:
            self._waiting.pop(key, None)
        return AgentResult(**{**asdict(result), "seconds": time.monotonic() - began})

    async def end(self) -> None:
        """Kill it and its children, and wait for it."""
        self.alive = False
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # stuck in the kernel: nothing more can be done
            await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        self._orders.close()

    async def _prepare(self, order: AgentOrder) -> None:
        try:
            async with asyncio.timeout(_START_SECONDS):
                with contextlib.suppress(ConnectionError):
                    self._orders.write(json.dumps(asdict(order)).encode() + b"\n")
                    await self._orders.drain()
                reply = await self._reply()
        except TimeoutError:
            raise UsageError(
                f"agent {order.target!r} was not imported within {_START_SECONDS:.0f} s"
            ) from None
        if reply is None:
            how = await self._how()
            raise UsageError(f"agent {order.target!r} could not be imported: {how}")
        if "fault" in reply:
            raise UsageError(str(reply["fault"]))
        self._reading = asyncio.create_task(self._read(order.seconds + _SILENCE_SECONDS))

    async def _read(self, patience: float) -> None:
        """Hand results out until the process ends or says nothing for `patience` seconds."""
        try:
            while True:
                async with asyncio.timeout(patience):
                    reply = await self._reply()
                if reply is None:
                    self._fail("exit", await self._how())
                    return
                future = self._waiting.get(str(reply.pop("key", "")))
                if future is not None and not future.done():
                    future.set_result(AgentResult(**reply))
        except TimeoutError:
            self._fail(
                "blocked_loop", f"something blocks the worker for more than {patience:.0f} s"
            )
        except (TypeError, ValueError):
            self._fail("exit", "the worker's replies are not readable: the agent wrote to them")

    async def _reply(self) -> dict[str, Any] | None:
        """None when the process has closed its output.

        Raises:
            ValueError: it is no JSON object.
        """
        line = await self._replies.readline()
        if not line:
            return None
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise TypeError(f"{reply!r:.80} is no reply")
        return reply

    def _fail(self, cause: str, detail: str) -> None:
        """The process is of no use any more: all its episodes have failed."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for future in self._waiting.values():
            if not future.done():
                future.set_result(AgentResult(cause=cause, detail=detail))

    async def _how(self) -> str:
        try:
            code = await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        except TimeoutError:
            return "the worker closed its output"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the worker ended with {how}"
