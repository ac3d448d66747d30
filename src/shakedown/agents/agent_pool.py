"""Agents in worker processes: code that blocks, loops or exits cannot starve who waits for it.

    async with AgentPool(AgentSetup("my/agent.py:MyAgent", "127.0.0.1", 8000, "policy")) as pool:
        result = await pool.run("key-1", "http://127.0.0.1:8000/e/key-1/v1", '{"messages": []}')

Episodes are spread over the workers; all of one worker share its event loop. A worker that ends,
or that is silent because something blocks it outside of Python, costs the episodes it has.
"""

import asyncio
import dataclasses
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from shakedown.agents.agent_worker import ALIVE_SECONDS, LONGEST_LINE
from shakedown.agents.contract import Reward
from shakedown.agents.worker_pool import UNREADABLE, Worker, WorkerPool, ending

_START_SECONDS = 120.0  # of Python and the agent's imports, on a busy machine
_SILENCE_SECONDS = 10.0 + ALIVE_SECONDS  # beyond what an episode may take


@dataclass(frozen=True)
class AgentSetup:
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


class _AgentWorker(Worker):
    """Has many callers at a time: a reply names its episode."""

    def __init__(self, *streams: Any) -> None:
        super().__init__(*streams)
        self._waiting: dict[str, asyncio.Future[AgentResult]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._failure: AgentResult | None = None

    def read_replies(self, patience: float) -> None:
        """From now on hand results out; the process may be silent for `patience` seconds."""
        self._reading = asyncio.create_task(self._read(patience))

    async def run(self, key: str, base_url: str, data: str) -> AgentResult:
        """Hand an episode over and wait for what becomes of it."""
        if self._failure is not None:  # it ended between its start and this call
            return self._failure
        future: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._waiting[key], began = future, time.monotonic()
        # `data` is JSON already: a row with its images is not parsed and written again here.
        head = json.dumps({"key": key, "base_url": base_url})
        try:
            await self.send(f'{head[:-1]}, "data": {data}}}')
            result = await future
        finally:
            self._waiting.pop(key, None)
        return dataclasses.replace(result, seconds=time.monotonic() - began)

    async def end(self) -> None:
        """Also stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await super().end()

    async def _read(self, patience: float) -> None:
        try:
            while True:
                async with asyncio.timeout(patience):
                    reply = await self.reply()
                if reply is None:
                    self._fail("exit", ending(await self.code()))
                    return
                future = self._waiting.get(str(reply.pop("key", "")))
                if future is not None and not future.done():
                    future.set_result(AgentResult(**reply))
        except TimeoutError:
            self._fail(
                "blocked_loop", f"something blocks the worker for more than {patience:.0f} s"
            )
        except (TypeError, ValueError):
            self._fail("exit", UNREADABLE)

    def _fail(self, cause: str, detail: str) -> None:
        """The process is of no use any more: all its episodes have failed."""
        self.kill()
        self._failure = AgentResult(cause=cause, detail=detail)
        for future in self._waiting.values():
            if not future.done():
                future.set_result(self._failure)


class AgentPool(WorkerPool[_AgentWorker]):
    """Runs one agent class in processes of its own, many episodes in each.

    Args:
        setup: what to run.
        workers: as for `WorkerPool`.
    """

    def __init__(self, setup: AgentSetup, *, workers: int | None = None) -> None:
        super().__init__(self._start_worker, workers)
        self._setup = setup

    async def run(self, key: str, base_url: str, data: str) -> AgentResult:
        """Run one episode; every outcome, a failure too, is a result.

        Args:
            key: names the episode; given to the agent as `api_key`.
            base_url: given to the agent.
            data: one row as JSON.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        async with self.worker() as worker:
            return await worker.run(key, base_url, data)

    async def _start_worker(self) -> _AgentWorker:
        worker = await _AgentWorker.start(
            "shakedown.agents.agent_worker",
            asdict(self._setup),
            what=f"agent {self._setup.target!r}",
            seconds=_START_SECONDS,
            longest_reply=LONGEST_LINE,
        )
        worker.read_replies(self._setup.seconds + _SILENCE_SECONDS)
        return worker
