"""Rewards in worker processes: code that loops, allocates or exits costs one episode, not the run.

    async with RewardPool("gsm8k") as pool:
        values = await pool.score(["#### 4", "#### 5"], "4")

Workers are started once, with nothing imported but the reward. One that is killed (too long, too
much memory, gone) is replaced when the next call needs it.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shakedown.agents.imports import worker_errors
from shakedown.core.errors import ShakedownError
from shakedown.processes.workers import Worker, WorkerLostError, WorkerPool

# All columns of a row, for a reward that asks for them.
Columns = Mapping[str, Any]
NO_COLUMNS: Columns = MappingProxyType({})
RewardCause = Literal["timeout", "memory", "exit", "exception", "bad_return"]

_GIB = 1 << 30
_START_SECONDS = 60.0  # of Python itself, on a busy machine or a slow file system
# Failures after which the process is as good as before.
_HARMLESS: tuple[RewardCause, ...] = ("exception", "bad_return")


@dataclass(frozen=True)
class RewardLimits:
    """Limits of one call. `seconds`: wall time. `memory_gb`: GiB of a worker's data.

    `failed_share`: of all calls, that may fail.
    """

    seconds: float = 10.0
    memory_gb: float = 4.0
    failed_share: float = 0.05


@dataclass(frozen=True)
class RewardFailure:
    """A call without a reward: its cause, and the details for a person."""

    cause: RewardCause
    detail: str

    def __str__(self) -> str:
        return f"reward {self.cause}: {self.detail}"


class _RewardWorker(Worker):
    """Has one caller at a time: its replies come in the order of the completions."""

    async def score(
        self, completions: Sequence[str], asked: str, seconds: float, count: Callable[[], None]
    ) -> list[float | RewardFailure]:
        """Results up to the first failure that makes the process useless, which is the last.

        Args:
            asked: `answer` and `row` as JSON.
            seconds: that one reward may take.
            count: called after each result.
        """
        results: list[float | RewardFailure] = []
        # Beside the reading: a request may be longer than the pipe holds, and so may the replies.
        request = f'{{"completions": {json.dumps(list(completions))}, {asked[1:]}'
        sending = asyncio.create_task(self.send(request))
        useful = False
        try:
            while len(results) < len(completions):
                result = await self._result(seconds)
                results.append(result)
                count()
                if isinstance(result, RewardFailure) and result.cause not in _HARMLESS:
                    return results
            useful = True
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if not useful:  # also when this call is cancelled: its replies would be the next one's
                await self.end()
        return results

    async def _result(self, seconds: float) -> float | RewardFailure:
        try:
            reply = await self.reply(seconds)
        except TimeoutError:
            return RewardFailure("timeout", f"no reward within {seconds:g} s")
        except WorkerLostError as lost:
            if lost.code == -signal.SIGALRM:
                return RewardFailure("timeout", "its own alarm ended the worker")
            return RewardFailure("memory" if lost.memory else "exit", str(lost))
        value = reply.get("value")
        if isinstance(value, float):
            return value
        return RewardFailure(reply.get("cause", "exit"), str(reply.get("detail", reply)))


class RewardPool(WorkerPool[_RewardWorker]):
    """Runs one reward function in dedicated processes.

    Args:
        reward: a name of the registry, `package.module:function` or `path/to/file.py:function`.
        limits: of a call; the import of own code has the same limits, and not less than a minute.
        workers: as for `WorkerPool`.

    `progress` counts calls that ended, well or not.
    """

    def __init__(
        self, reward: str, limits: RewardLimits | None = None, *, workers: int | None = None
    ) -> None:
        super().__init__(self._start_worker, workers)
        self._reward, self._limits = reward, limits or RewardLimits()
        # As many callers as workers, so that each caller has a worker of its own.
        self._free = asyncio.Semaphore(self.most)
        self.progress = 0

    async def score(
        self, completions: Sequence[str], answer: str, row: Columns = NO_COLUMNS
    ) -> list[float | RewardFailure]:
        """The reward of each completion, or why there is none; a failure loses no other one.

        Args:
            row: all columns, of which JSON has no form for some: they become text.

        Raises:
            UsageError, LaunchError: a worker had to be replaced and could not be.
        """
        results: list[float | RewardFailure] = []
        asked = json.dumps({"answer": answer, "row": dict(row)}, default=str)
        async with self._free:
            while len(results) < len(completions):
                async with self.worker() as worker:
                    left = completions[len(results) :]
                    results += await worker.score(left, asked, self._limits.seconds, self._count)
        return results

    def _count(self) -> None:
        self.progress += 1

    async def _start_worker(self) -> _RewardWorker:
        seconds = max(self._limits.seconds, _START_SECONDS)
        setup: dict[str, Any] = {
            "reward": self._reward,
            "import_seconds": seconds,
            "seconds": self._limits.seconds,
            "bytes": int(self._limits.memory_gb * _GIB),
        }
        with worker_errors():
            return await _RewardWorker.start(
                "shakedown.agents.reward_worker",
                setup,
                what=f"reward {self._reward!r}",
                seconds=seconds,
            )


async def score_rows(
    reward: str,
    rows: Iterable[tuple[str, str, Columns]],
    limits: RewardLimits,
    *,
    progress: Callable[[], None],
) -> list[float | RewardFailure]:
    """The reward of each (completion, answer, row), for a caller without a loop: `asyncio.run` it.

    Args:
        progress: called after each row.

    Raises:
        UsageError, LaunchError: as RewardPool.
    """
    results: list[float | RewardFailure] = []
    async with RewardPool(reward, limits, workers=1) as pool:
        for completion, answer, row in rows:
            results += await pool.score([completion], answer, row)
            progress()
    return results


async def reward_fault(reward: str, limits: RewardLimits | None = None) -> str:
    """The fault of a reward, found in a separate process; empty when it can be used."""
    try:
        async with RewardPool(reward, limits, workers=1):
            return ""
    except ShakedownError as error:
        return str(error)
