"""Rewards in worker processes: code that loops, allocates or exits costs one episode, not the run.

    async with RewardPool("gsm8k") as pool:
        values = await pool.score(["#### 4", "#### 5"], "4")

Workers are started once, with nothing imported but the reward. One that is killed (too long, too
much memory, gone) is replaced when the next call needs it.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from shakedown.agents.worker_process import WorkerProcess, start_worker
from shakedown.core.errors import ShakedownError, UsageError

Cause = Literal["timeout", "memory", "exit", "exception", "bad_return"]

_GIB = 1 << 30
_START_SECONDS = 60.0  # of Python itself, on a busy machine or a slow file system
_LONGEST_REPLY = 1 << 16
_END_SECONDS = 2.0


@dataclass(frozen=True)
class RewardLimits:
    """What one call may take. `seconds`: wall time. `memory_gb`: GiB of a worker's data."""

    seconds: float = 10.0
    memory_gb: float = 4.0


@dataclass(frozen=True)
class RewardFailure:
    """A call without a reward: its cause, and what a person needs to see."""

    cause: Cause
    detail: str

    def __str__(self) -> str:
        return f"reward {self.cause}: {self.detail}"


class RewardPool:
    """Runs one reward function in processes of its own. Use it on one event loop.

    Args:
        reward: a name of the registry, `package.module:function` or `path/to/file.py:function`.
        limits: of a call; the import of own code has the same limits, and not less than a minute.
        workers: processes at most, by default a quarter of the CPU cores, 2 to 16; each is
            started when it is first needed, the first at once.

    `done` counts calls that ended, well or not.
    """

    def __init__(
        self, reward: str, limits: RewardLimits | None = None, *, workers: int | None = None
    ) -> None:
        self._reward, self._limits = reward, limits or RewardLimits()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._free = asyncio.Semaphore(workers or _default_workers())
        self.done = 0

    async def __aenter__(self) -> Self:
        """Start the first worker: what cannot be imported is known before anything else starts.

        Raises:
            UsageError: no such reward, or own code that cannot be imported or called.
            LaunchError: a process could not be started.
        """
        self._idle.append(await self._start())
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.gather(*(worker.end() for worker in list(self._all)))
        self._all.clear()
        self._idle.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        return sorted(worker.pid for worker in self._all if worker.alive)

    async def score(self, completions: Sequence[str], answer: str) -> list[float | RewardFailure]:
        """The reward of each completion, or why there is none; a failure loses no other one.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        results: list[float | RewardFailure] = []
        async with self._free:
            while len(results) < len(completions):
                worker = await self._taken()
                left = completions[len(results) :]
                try:
                    results += await worker.score(left, answer, self._limits, self._count)
                finally:  # also when this call is cancelled: its replies would be the next one's
                    await self._keep_or_end(worker)
        return results

    def _count(self) -> None:
        self.done += 1

    async def _taken(self) -> "_Worker":
        """An idle worker that has not been killed meanwhile, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._all.discard(worker)
            await worker.end()
        return await self._start()

    async def _keep_or_end(self, worker: "_Worker") -> None:
        if worker.usable:
            self._idle.append(worker)
        else:
            self._all.discard(worker)
            await worker.end()

    async def _start(self) -> "_Worker":
        worker = await _Worker.start()
        self._all.add(worker)
        try:
            await worker.prepare(self._reward, self._limits)
        except BaseException:
            self._all.discard(worker)
            await worker.end()
            raise
        return worker


class _Worker:
    """One process; `usable` is False from the start of a call until all its replies are read."""

    def __init__(self, started: WorkerProcess) -> None:
        self._process, self._orders = started.process, started.orders
        self._replies = started.replies
        self.usable = False

    @classmethod
    async def start(cls) -> "_Worker":
        return cls(
            await start_worker(
                "shakedown.agents.reward_worker",
                name="a reward worker",
                longest_line=_LONGEST_REPLY,
            )
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def prepare(self, reward: str, limits: RewardLimits) -> None:
        """Let it import the reward.

        Raises:
            UsageError: it cannot be imported or called, or ends or loops on the way.
        """
        seconds = max(limits.seconds, _START_SECONDS)
        order = {
            "reward": reward,
            "import_seconds": seconds,
            "seconds": limits.seconds,
            "bytes": int(limits.memory_gb * _GIB),
        }
        try:
            async with asyncio.timeout(seconds):
                await self._send(order)
                reply = await self._reply()
        except TimeoutError:
            raise UsageError(f"reward {reward!r} was not imported within {seconds:.0f} s") from None
        if isinstance(reply, RewardFailure):
            raise UsageError(f"reward {reward!r} could not be imported: {reply.detail}")
        if "fault" in reply:
            raise UsageError(str(reply["fault"]))
        self.usable = True

    async def score(
        self,
        completions: Sequence[str],
        answer: str,
        limits: RewardLimits,
        count: Callable[[], None],
    ) -> list[float | RewardFailure]:
        """Results up to the first failure that makes the process useless, which is the last."""
        self.usable = False
        results: list[float | RewardFailure] = []
        sending = asyncio.create_task(
            self._send({"completions": list(completions), "answer": answer})
        )
        try:
            while len(results) < len(completions):
                result = await self._result(limits)
                results.append(result)
                count()
                if isinstance(result, RewardFailure) and result.cause not in _HARMLESS:
                    return results
            self.usable = True
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return results

    async def end(self) -> None:
        """Kill it and its children, and wait for it."""
        self.usable = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # stuck in the kernel: nothing more can be done
            await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        self._orders.close()

    async def _result(self, limits: RewardLimits) -> float | RewardFailure:
        try:
            async with asyncio.timeout(limits.seconds):
                reply = await self._reply()
        except TimeoutError:
            return RewardFailure("timeout", f"no reward within {limits.seconds:g} s")
        if isinstance(reply, RewardFailure):
            return reply
        value = reply.get("value")
        if isinstance(value, float):
            return value
        return RewardFailure(reply.get("cause", "exit"), str(reply.get("detail", reply)))

    async def _send(self, body: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended: the reply says how
            self._orders.write(json.dumps(body).encode() + b"\n")
            await self._orders.drain()

    async def _reply(self) -> dict[str, Any] | RewardFailure:
        try:
            line = await self._replies.readline()
            reply = json.loads(line) if line else None
        except ValueError:  # not JSON, or a line without end: the reward wrote it
            return RewardFailure("exit", "the worker's replies are not readable")
        if isinstance(reply, dict):
            return reply
        return await self._ended()

    async def _ended(self) -> RewardFailure:
        try:
            code = await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
        except TimeoutError:
            return RewardFailure("exit", "the worker closed its output")
        if code == -signal.SIGALRM:
            return RewardFailure("timeout", "its own alarm ended the worker")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return RewardFailure("exit", f"the worker ended with {how}")


# Failures after which the process is as good as before.
_HARMLESS: tuple[Cause, ...] = ("exception", "bad_return")


def _default_workers() -> int:
    return min(16, max(2, len(os.sched_getaffinity(0)) // 4))


async def score_rows(
    reward: str,
    rows: Iterable[tuple[str, str]],
    limits: RewardLimits,
    *,
    progress: Callable[[], None],
) -> list[float | RewardFailure]:
    """The reward of each (completion, answer), for a caller without a loop: `asyncio.run` it.

    Args:
        progress: called after each row.

    Raises:
        UsageError, LaunchError: as RewardPool.
    """
    results: list[float | RewardFailure] = []
    async with RewardPool(reward, limits, workers=1) as pool:
        for completion, answer in rows:
            results += await pool.score([completion], answer)
            progress()
    return results


async def reward_fault(reward: str, limits: RewardLimits | None = None) -> str:
    """What is wrong with a reward, found in a process of its own; empty when it can be used."""
    try:
        async with RewardPool(reward, limits, workers=1):
            return ""
    except ShakedownError as error:
        return str(error)
