"""Agents in worker processes: code that blocks, loops or exits cannot starve its caller.

    endpoint = AgentEndpoint("http://127.0.0.1:8000/v1", "None", "policy")
    async with AgentPool(AgentSetup("my/agent.py:MyAgent", endpoint)) as pool:
        result = await pool.run_episode('{"messages": []}')

Groups of episodes are spread over the workers, each with one instance of the class; all of one
worker share its event loop. A worker that ends, or that is silent because something blocks it
outside of Python, costs the episodes it has.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from shakedown.agents.agent_worker import ALIVE_SECONDS, LONGEST_LINE
from shakedown.agents.call_log import CallLog
from shakedown.agents.contract import Reward
from shakedown.agents.endpoint import AgentEndpoint
from shakedown.agents.event_loop_lag import CpuWait
from shakedown.agents.imports import worker_errors
from shakedown.agents.measured import Measured, merged
from shakedown.agents.wire import Sent, WireOutcome, judged, last_answer, unknown_ids
from shakedown.core.errors import ShakedownError
from shakedown.debug import debug_settings
from shakedown.processes.workers import UNREADABLE, Seat, Worker, WorkerLostError, WorkerPool

T = TypeVar("T")
W = TypeVar("W", bound=Worker)

_START_SECONDS = 120.0  # of Python and the agent's imports, on a busy machine
_SHORTEST_SECONDS = 0.5  # worth waiting on for a worker that had no CPU
# Beyond what an episode may take: an agent that blocks is first ended by a signal, once a second.
_SILENCE_SECONDS = 10.0 + ALIVE_SECONDS


@dataclass(frozen=True)
class AgentSetup:
    """The setup that every worker is given.

    `target`: as `shakedown agent run` takes it. `seconds`: that an episode may take. `recorded`:
    the endpoint is a proxy, to which requests name their episode and which sees them. `measure`:
    keep what is measured until `take_measured`. `share_tls`: let a worker's clients that ask for
    the default TLS context share one. `kwargs`: for the constructor, of what JSON has a form for.
    `import_only`: import the class and check its contract, for which no client library is needed.
    """

    target: str
    endpoint: AgentEndpoint
    seconds: float = 120.0
    recorded: bool = False
    measure: bool = False
    share_tls: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    import_only: bool = False


@dataclass(frozen=True)
class AgentResult:
    """The result of one episode.

    `cause` is empty when it went well, else a key of `causes.CAUSES`; `status` is the HTTP status
    that failed it, else 0; `trace` is the traceback of an exception in the agent. `seconds`: wall
    time. `log`: its calls, where a proxy kept them. `sent`: what its worker saw of them, None where
    that cannot be told. `calls_made`, `calls_failed`: its requests for
    replies, and those of them that the server did not answer well; `lost`: how many of these by
    hop, `resent`: those that were sent again and answered; `answered`: when it last answered one,
    as Unix time, 0 for never. `hop`: of the call that failed the episode. `by_agent`: as in
    `WireOutcome`.
    """

    reward: Reward | None = None
    cause: str = ""
    detail: str = ""
    status: int = 0
    trace: str = ""
    seconds: float = 0.0
    log: CallLog | None = None
    sent: Sent | None = None
    calls_made: int = 0
    calls_failed: int = 0
    answered: float = 0.0
    hop: str = ""
    lost: Mapping[str, int] = field(default_factory=dict)
    resent: int = 0
    by_agent: bool = False

    def by_wire(self, sent: Sent) -> "AgentResult":
        """The result, corrected by the answers to its requests."""
        calls = sent.calls
        found = judged(WireOutcome(self.cause, self.detail, self.status), sent, self.seconds)
        wrong = unknown_ids(self.reward, calls) if not found.cause else ""
        if wrong:
            found = WireOutcome("bad_return", wrong)
        return dataclasses.replace(
            self,
            **vars(found),
            reward=None if found.cause else self.reward,
            sent=None,  # all of it is told now
            calls_made=len(calls),
            calls_failed=sum(call.failed for call in calls),
            answered=last_answer(calls),
            by_agent=found.by_agent,
            lost=Counter(call.hop for call in calls if call.failed),
            resent=sum(call.outcome == "retried and answered" for call in calls),
        )


class _AgentWorker(Worker):
    """Has many callers at a time: a reply names its episode."""

    def __init__(self, *streams: Any) -> None:
        super().__init__(*streams)
        self._waiting: dict[str, asyncio.Future[AgentResult]] = {}
        self._measuring: asyncio.Future[Measured] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._failure: AgentResult | None = None

    def read_replies(self, patience: float) -> None:
        """Start to hand out results; the process may be silent for `patience` seconds."""
        self._reading = asyncio.create_task(self._read(patience))

    async def run(
        self, data: str, key: str, base_url: str, api_key: str, group: str
    ) -> AgentResult:
        """Hand an episode over and wait for its result."""
        if self._failure is not None:  # it ended between its start and this call
            return self._failure
        future: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self._waiting[key], began = future, time.monotonic()
        # `data` is JSON already: a row with its images is not parsed and written again here.
        head = json.dumps({"key": key, "base_url": base_url, "api_key": api_key, "group": group})
        try:
            await self.send(f'{head[:-1]}, "data": {data}}}')
            result = await future
        finally:
            self._waiting.pop(key, None)
        return dataclasses.replace(result, seconds=time.monotonic() - began)

    async def take_measured(self) -> Measured:
        """The measurements since the last call, which has ended; none of a lost process."""
        if self._failure is not None:
            return Measured()
        self._measuring = asyncio.get_running_loop().create_future()
        await self.send("{}")
        return await self._measuring

    async def end(self) -> None:
        """End the process and stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await super().end()

    async def _read(self, patience: float) -> None:
        try:
            while True:
                reply = await self._next(patience)
                if "ended" in reply:
                    self._fail("exit", str(reply["ended"]))
                    return
                self._hand_out(reply)
        except TimeoutError:
            self._fail(
                "blocked_loop", f"something blocks the worker for more than {patience:.0f} s"
            )
        except WorkerLostError as lost:
            self._fail("exit", str(lost))
        except (AttributeError, KeyError, TypeError, ValueError):
            self._fail("exit", UNREADABLE)

    async def _next(self, patience: float) -> dict[str, Any]:
        """The next reply; TimeoutError after `patience` seconds in which the process had a CPU.

        Where other programs take all of the machine a good worker is silent for long, too.
        """
        left = patience
        with contextlib.closing(CpuWait(self.pid)) as cpu:
            while True:
                before = cpu.seconds()
                try:
                    return await self.reply(left)
                except TimeoutError:
                    left = cpu.seconds() - before
                    if left < _SHORTEST_SECONDS:
                        raise

    def _hand_out(self, reply: dict[str, Any]) -> None:
        future = self._waiting.get(str(reply.pop("key", "")))
        if future is not None and not future.done():
            wire = reply.pop("wire", None)
            future.set_result(AgentResult(**reply, sent=Sent.read(wire) if wire else None))
        elif "measured" in reply and self._measuring is not None and not self._measuring.done():
            self._measuring.set_result(Measured.read(reply["measured"]))

    def _fail(self, cause: str, detail: str) -> None:
        """Fail all episodes of the process, which is unusable from now on."""
        self.kill()
        self._failure = AgentResult(cause=cause, detail=detail)
        for future in self._waiting.values():
            if not future.done():
                future.set_result(self._failure)
        if self._measuring is not None and not self._measuring.done():
            self._measuring.set_result(Measured())


@dataclass(eq=False)
class AgentGroup(Seat[_AgentWorker]):
    """Episodes that share one instance of the class."""

    name: str = ""


class AgentPool(WorkerPool[_AgentWorker]):
    """Runs one agent class in dedicated processes, many episodes in each.

    Args:
        setup: what to run.
        workers: as for `WorkerPool`.
    """

    def __init__(self, setup: AgentSetup, *, workers: int | None = None) -> None:
        super().__init__(self._start_worker, workers)
        self._setup, self._numbers = setup, itertools.count()

    @contextlib.asynccontextmanager
    async def group(self) -> AsyncIterator[AgentGroup]:
        """The seat of one group's episodes: one instance of the class runs them all."""
        group = AgentGroup(name=str(next(self._numbers)))
        try:
            yield group
        finally:
            if group.worker is not None and group.worker.alive:
                await group.worker.send(json.dumps({"forget": group.name}))

    async def run_episode(
        self,
        data: str,
        *,
        group: AgentGroup | None = None,
        key: str = "",
        base_url: str = "",
        name: str = "",  # noqa: ARG002 - as any source of episodes
    ) -> AgentResult:
        """Run one episode; every outcome, a failure too, is a result.

        Args:
            data: one row as JSON.
            group: of `group`; left out, the episode has an instance of its own.
            name: not used; the recording proxy compares episodes by it.
            key: names the episode to the recording proxy, and is given to the agent as `api_key`.
            base_url: given to the agent. Left out, both are the setup's endpoint's.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        endpoint = self._setup.endpoint
        async with self.worker(group) as worker:
            result = await worker.run(
                data,
                key or str(next(self._numbers)),
                base_url or endpoint.base_url,
                key or endpoint.api_key,
                group.name if group is not None else "",
            )
        if result.sent is None or self._setup.recorded:
            return result  # the recording proxy saw more of its calls
        return result.by_wire(result.sent)

    async def take_measured(self) -> Measured:
        """The measurements of all workers since the last call; one caller at a time."""
        return merged(
            await asyncio.gather(*(worker.take_measured() for worker in self.workers_alive))
        )

    async def _start_worker(self) -> _AgentWorker:
        # A breakpoint may stand in what the module does when it is imported.
        seconds = debug_settings.NO_TIMEOUT if debug_settings.is_asked() else _START_SECONDS
        worker = await _started(_AgentWorker, self._setup, seconds)
        worker.read_replies(self._setup.seconds + _SILENCE_SECONDS)
        return worker


async def _started(kind: type[W], setup: AgentSetup, seconds: float) -> W:
    with worker_errors():
        return await kind.start(
            "shakedown.agents.agent_worker",
            asdict(setup),
            what=f"agent {setup.target!r}",
            seconds=seconds,
            longest_reply=LONGEST_LINE,
        )


async def agent_fault(
    target: str, kwargs: Mapping[str, Any] | None = None, *, seconds: float
) -> str:
    """The fault of an agent, found in a separate process; empty when it can be used.

    Args:
        kwargs: for the constructor, of what JSON has a form for.
        seconds: that its import may take.
    """
    # As for episodes: a module may make its client when it is imported.
    endpoint = AgentEndpoint("http://127.0.0.1:9/v1", "None", "policy")
    setup = AgentSetup(target, endpoint, kwargs=dict(kwargs or {}), import_only=True)
    try:
        worker = await _started(Worker, setup, seconds)
    except ShakedownError as error:
        return str(error)
    await worker.end()
    return ""


async def all_ended(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all; an error is raised only when every call has ended.

    `asyncio.gather` alone raises the first one at once, and leaves episodes that nobody awaits.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
