"""The watching of submitted jobs by their result files and Slurm's states."""

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit import slurm, status
from snakemake_executor_plugin_submitit.exclusion import NodeGuard
from snakemake_executor_plugin_submitit.journal import Entry
from snakemake_executor_plugin_submitit.logs import show
from snakemake_executor_plugin_submitit.node import JobResult, read_result
from snakemake_executor_plugin_submitit.polling import JobStates, Poller
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.status import JobJudgement
from snakemake_executor_plugin_submitit.waiting import Pending, WaitReport


@dataclass
class WatchedJob:
    """A submitted job under watch; `unclear_since` is monotonic seconds.

    `doomed`: why it counts as failed as soon as Slurm says that it is gone, for which it is
    `cancelled` first. `is_shown`: its log has a link by rule and wildcards.
    """

    entry: Entry
    unclear_since: float | None = None
    doomed: str = ""
    cancelled: bool = False
    is_shown: bool = False


class JobWatcher:
    """A watcher of jobs: by their files, twice per second, and by Slurm's states, when the poller
    asks."""

    def __init__(
        self,
        base: Path,
        settings: ExecutorSettings,
        poller: Poller,
        nodes: NodeGuard,
        *,
        logs: Path,
        logger: Any,
    ) -> None:
        self.poller = poller
        self._base = base
        self._logs = logs
        self._grace = {"requeue": settings.requeue_grace, "result": settings.result_grace}
        self._nodes = nodes
        self._logger = logger
        self._waiting = WaitReport(logger.info)
        self._asking: asyncio.Task[JobStates | None] | None = None
        self._said: set[str] = set()

    async def look(
        self, watches: Sequence[WatchedJob], limiter: AbstractAsyncContextManager[Any]
    ) -> list[JobJudgement]:
        """The current judgement of each job. `limiter`: entered for each query to Slurm."""
        results = self._results([watch.entry for watch in watches])
        answer = await self._answer(watches, results, limiter)
        return [self._judge(watch, results.get(watch.entry), answer) for watch in watches]

    def say_once(self, words: str) -> None:
        """Warn; of the same words only the first time."""
        if words not in self._said:
            self._said.add(words)
            self._logger.warning(words)

    def _results(self, entries: Collection[Entry]) -> dict[Entry, JobResult]:
        """Results by entry; one listing a folder also refreshes a network file system's cache."""
        present = {run: self._listed(run) for run in {entry.run for entry in entries}}
        found = {
            entry: read_result(entry.result_file(self._base))
            for entry in entries
            if f"{entry.token}.json" in present[entry.run]
        }
        return {entry: result for entry, result in found.items() if result is not None}

    def _listed(self, run: str) -> set[str]:
        """Names of the run's result files; none when the folder cannot be read just now."""
        try:
            return set(os.listdir(self._base / run / "results"))
        except OSError as error:
            self.say_once(f"cannot look for results: {error}")
            return set()

    async def _answer(
        self,
        watches: Sequence[WatchedJob],
        results: Mapping[Entry, JobResult],
        limiter: AbstractAsyncContextManager[Any],
    ) -> JobStates | None:
        """Slurm's word about jobs without a success; None when it is not asked or silent.

        It is asked beside the loop: a controller that does not answer holds up no success.
        """
        if self._asking is not None:
            if not self._asking.done():
                return None
            answer, self._asking = self._asking.result(), None
            return answer
        unfinished = [w for w in watches if not _is_success(results.get(w.entry))]
        soon = any(w.entry in results or (w.doomed and not w.cancelled) for w in unfinished)
        if unfinished and self.poller.is_due(soon=soon):
            async with limiter:
                self._asking = asyncio.create_task(asyncio.to_thread(self._ask, unfinished))
        return None

    def _ask(self, watches: Sequence[WatchedJob]) -> JobStates | None:
        doomed = [watch for watch in watches if watch.doomed and not watch.cancelled]
        try:
            self.poller.cancel([watch.entry for watch in doomed])
        except slurm.SlurmError as error:
            self._logger.warning(f"cannot make sure that a lost job does not run: {error}")
            # Not counted as cancelled: the next question tries again.
            doomed = []
        answer = self.poller.ask([watch.entry for watch in watches])
        if answer is not None:
            for watch in doomed:
                watch.cancelled = True
            self._show_logs(watches, answer)
            self._waiting.update(_pending(answer))
            self._nodes.look(answer, has_accounting=self.poller.has_accounting)
        return answer

    def _show_logs(self, watches: Sequence[WatchedJob], answer: JobStates) -> None:
        """Link the logs of jobs that run; one in the queue has no file yet."""
        for watch in watches:
            entry, job = watch.entry, answer[watch.entry]
            if watch.is_shown or job is None or job.waits or job.has_ended:
                continue
            watch.is_shown = True
            try:
                show(entry.log_file(self._base), Path(entry.log), self._logs)
            except OSError as error:
                self.say_once(f"cannot link the log of Slurm job {entry.job_id}: {error}")

    def _judge(
        self, watch: WatchedJob, result: JobResult | None, answer: JobStates | None
    ) -> JobJudgement:
        """`status.judge`, with an unclear state that has lasted too long counted as failed.

        Before that Slurm is told to end the job, and must say that it is gone: what only seems to
        be lost would run beside its retry.
        """
        if _is_success(result):
            return JobJudgement("succeeded")
        # Not in the answer: submitted after the question.
        if answer is None or watch.entry not in answer:
            return JobJudgement("running")
        judgement = status.judge(result, answer[watch.entry])
        if watch.doomed:
            if judgement.outcome == "running" or not watch.cancelled:
                return JobJudgement("running")
            return JobJudgement("failed", watch.doomed)
        if judgement.outcome != "unclear":
            watch.unclear_since = None
            return judgement
        now = time.monotonic()
        if watch.unclear_since is None:
            watch.unclear_since = now
        if now - watch.unclear_since >= self._grace[judgement.patience]:
            watch.doomed = judgement.reason
        return judgement


def _is_success(result: JobResult | None) -> bool:
    return result is not None and result.exit_code == 0


def _pending(answer: JobStates) -> list[Pending]:
    return [
        Pending(entry.label, entry.job_id, job.reason, job.start)
        for entry, job in answer.items()
        if job is not None and job.waits
    ]
