"""The executor: Snakemake's ready jobs in, Slurm arrays out, results and failures back."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from snakemake_executor_plugin_submitit import reattach, slurm, status
from snakemake_executor_plugin_submitit.exclusion import NodeHistory
from snakemake_executor_plugin_submitit.journal import (
    Entry,
    Journal,
    JournalError,
    name_ends,
    prune,
)
from snakemake_executor_plugin_submitit.logs import Follower, last_lines
from snakemake_executor_plugin_submitit.node import Result, read_result
from snakemake_executor_plugin_submitit.outbox import Outbox
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience
from snakemake_executor_plugin_submitit.polling import Answer, Poller
from snakemake_executor_plugin_submitit.resources import ResourceError
from snakemake_executor_plugin_submitit.sending import Sender
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.work import Prepared, Watch, label, prepare

# Result files are looked for this often; it costs one directory listing, no call to Slurm.
_FILE_SECONDS = 0.5
_CANCEL_PATIENCE = 60.0
# Where Slurm enforces memory without saying so in the state, its word is among these last lines.
_MEMORY_LINES = 20
_RUNS_KEPT = 20


class Executor(RemoteExecutor):  # type: ignore[misc]  # untyped base
    """Runs each job as `snakemake` on a node; see docs/executor.md."""

    def __post_init__(self) -> None:
        self.settings: ExecutorSettings = self.workflow.executor_settings or ExecutorSettings()
        self._base = Path(self.settings.folder).absolute()
        self._live: dict[str, Entry] = {}
        self._follower = Follower() if self.settings.follow else None
        self._nodes = NodeHistory()
        self._said: set[str] = set()
        self._asking: asyncio.Task[Answer | None] | None = None
        self._poller = Poller(
            seconds=self.workflow.remote_execution_settings.seconds_between_status_checks,
            patience=self.settings.patience,
            say=self.logger.warning,
        )
        self._journal, candidates = self._open()
        self._sender = Sender(
            self._journal,
            self.settings,
            candidates,
            self._nodes,
            report=self,
            logger=self.logger,
        )
        self._outbox: Outbox[Prepared] = Outbox(self._send)
        self._sender.sleep = self._outbox.sleep

    def _open(self) -> tuple[Journal, dict[str, reattach.Candidate]]:
        try:
            journal = Journal(self._base)
            candidates = {} if self.settings.no_reattach else self._earlier_jobs(journal)
            prune(self._base, keep=_RUNS_KEPT)
        except OSError as error:
            raise WorkflowError(
                f"cannot use --submitit-folder {self._base}: {error}\n"
                "Give a folder that may be written, on a file system that the nodes share."
            ) from error
        except (GaveUpError, JournalError) as error:
            raise WorkflowError(
                f"cannot find out about the jobs of an earlier run: {error}\n"
                "Run again when Slurm answers; --submitit-no-reattach ignores those jobs."
            ) from error
        if candidates:
            self.logger.info(f"{len(candidates)} jobs of an earlier run may be taken over")
        return journal, candidates

    def _earlier_jobs(self, journal: Journal) -> dict[str, reattach.Candidate]:
        return with_patience(
            lambda: reattach.find(journal),
            patience=self.settings.patience,
            on_retry=self._say_retry,
        )

    @property
    def cores(self) -> str:
        """What a job may use: its node's own, whatever the submitting host has."""
        return "all"

    # --- submission

    def run_job(self, job: Any) -> None:
        self._put([job])

    def run_jobs(self, jobs: Sequence[Any]) -> None:
        for job in jobs:
            self.run_job_pre(job)
        self._put(jobs)

    def _put(self, jobs: Sequence[Any]) -> None:
        """Every job ends up reported: as submitted, or as an error."""
        _take_sigterm()
        declared = set(self.workflow.global_resources)
        prepared = []
        for job in jobs:
            try:
                prepared.append(prepare(job, self.format_job_exec(job), declared))
            except ResourceError as error:
                self.refused(job, str(error))
        self._outbox.put(prepared)

    def _send(self, jobs: Sequence[Prepared]) -> None:
        self._sender.send(jobs)

    def submitted(self, job: Any, entry: Entry, *, taken_over: bool) -> None:
        """The sender's report of a job that Slurm has."""
        self._live[entry.token] = entry
        if self._follower is not None:
            log = entry.log_file(self._base)
            self._follower.add(entry.token, label(job, entry), log, from_end=taken_over)
        self._poller.note_progress()
        info = SubmittedJobInfo(job, external_jobid=entry.job_id, aux={"watch": Watch(entry)})
        self.report_job_submission(info)

    def refused(self, job: Any, words: str) -> None:
        """The sender's report of a job that cannot be submitted."""
        self.report_job_error(SubmittedJobInfo(job), msg=f"{words}\n")

    def _say_once(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            self.logger.warning(words)

    def _say_retry(self, words: str, seconds: float) -> None:
        self.logger.warning(f"Slurm: {words}; trying again in {seconds:g} s")

    # --- status

    async def sleep(self) -> None:
        """The pause between two looks at the files; Snakemake's own option is the poller's."""
        await asyncio.sleep(_FILE_SECONDS)

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncIterator[SubmittedJobInfo]:
        # Snakemake starts this thread before `__post_init__`: without a job nothing is there yet.
        if not active_jobs:
            return
        results = self._results(active_jobs)
        answer = await self._answer(active_jobs, results)
        if self._follower is not None:
            self._follower.poll()
        for info in active_jobs:
            watch: Watch = info.aux["watch"]
            judgement = self._judge(watch, results.get(watch.entry), answer)
            if judgement.outcome == "succeeded":
                self._end(watch.entry, "succeeded")
                self.report_job_success(info)
            elif judgement.outcome == "failed":
                self._end(watch.entry, "failed")
                self._report_failure(info, judgement.reason)
            elif self._poller.is_given_up:
                self._report_silence(info)
            else:
                yield info

    def _results(self, active_jobs: Iterable[SubmittedJobInfo]) -> dict[Entry, Result]:
        """Results by entry; one listing a folder also refreshes a network file system's cache."""
        entries = [info.aux["watch"].entry for info in active_jobs]
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
            self._say_once(f"cannot look for results: {error}")
            return set()

    async def _answer(
        self, active_jobs: Iterable[SubmittedJobInfo], results: dict[Entry, Result]
    ) -> Answer | None:
        """Slurm's word about jobs without a success; None when it is not asked or silent.

        It is asked beside the loop: a controller that does not answer holds up no success.
        """
        if self._asking is not None:
            if not self._asking.done():
                return None
            answer, self._asking = self._asking.result(), None
            return answer
        entries = [info.aux["watch"].entry for info in active_jobs]
        open_entries = [e for e in entries if e not in results or results[e].exit_code]
        soon = any(entry in results for entry in open_entries)
        if open_entries and self._poller.is_due(soon=soon):
            async with self.status_rate_limiter:
                self._asking = asyncio.create_task(asyncio.to_thread(self._ask, open_entries))
        return None

    def _ask(self, entries: Sequence[Entry]) -> Answer | None:
        answer = self._poller.ask(entries)
        known = {job_id: job for job_id, job in (answer or {}).items() if job is not None}
        suspects = self._nodes.suspects(known)
        if suspects or self._nodes.unexplained:
            try:
                self._keep_off_lost(suspects, [i for i, job in known.items() if job.waits])
            except slurm.NoAccountingError:
                self._nodes.unexplained.clear()
            except slurm.SlurmError as error:
                jobs = ", ".join(sorted(suspects))
                self.logger.warning(f"cannot find out what interrupted {jobs}: {error}")
        return answer

    def _keep_off_lost(self, suspects: Mapping[str, str], waiting: Sequence[str]) -> None:
        """Exclude nodes that were lost under the suspects from what waits and what comes."""
        ran_on = {job_id: set(slurm.expand(nodes)) for job_id, nodes in suspects.items()}
        lost = slurm.lost_nodes(set().union(*ran_on.values()))
        self._nodes.unexplained |= {job_id for job_id, nodes in ran_on.items() if not nodes & lost}
        if self._nodes.unexplained and self._poller.has_accounting:
            # A node may be back already: the database knows what ended the attempt.
            ends = name_ends(self._journal.run)
            lost |= self._nodes.explain(slurm.last_attempts(self._nodes.unexplained, ends))
        lost -= self._nodes.lost
        if not lost:
            return
        self._nodes.lost |= lost
        nodes = ",".join(sorted(self._nodes.lost))
        self.logger.warning(f"lost {', '.join(sorted(lost))}: excluded for the rest of this run")
        slurm.exclude_from(waiting, nodes)

    def _judge(
        self, watch: Watch, result: Result | None, answer: Answer | None
    ) -> status.Judgement:
        """`status.judge`, with an unclear state that has lasted too long counted as failed."""
        if result is not None and result.exit_code == 0:
            return status.Judgement("succeeded")
        if answer is None or watch.entry.job_id not in answer:
            return status.Judgement("running")
        judgement = status.judge(result, answer[watch.entry.job_id])
        if judgement.outcome != "unclear":
            watch.unclear_since = None
            return judgement
        now = time.monotonic()
        if watch.unclear_since is None:
            watch.unclear_since = now
        grace = {"requeue": self.settings.requeue_grace, "result": self.settings.result_grace}
        if now - watch.unclear_since < grace[judgement.patience]:
            return judgement
        return status.Judgement("failed", judgement.reason)

    def _end(self, entry: Entry, outcome: str) -> None:
        if self._follower is not None:
            self._follower.remove(entry.token)
        self._live.pop(entry.token, None)
        try:
            self._journal.end(entry, outcome)
        except OSError as error:  # the next run looks at the job again, and finds its result
            self._say_once(f"cannot write the journal: {error}")
        self._poller.note_progress()

    def _report_failure(self, info: SubmittedJobInfo, reason: str) -> None:
        entry: Entry = info.aux["watch"].entry
        log = entry.log_file(self._base)
        lines = last_lines(log, max(self.settings.log_lines, _MEMORY_LINES))
        reason += status.memory_remark(reason, lines)
        shown = lines[-self.settings.log_lines :] if self.settings.log_lines else []
        message = status.failure_message(entry.job_id, reason, str(log), shown)
        self.report_job_error(info, msg=message, aux_logs=[str(log)])

    def _report_silence(self, info: SubmittedJobInfo) -> None:
        """Give the job up without ending it: a retry or the next run takes it over."""
        self._sender.keep(info.aux["watch"].entry)
        self.report_job_error(
            info,
            msg=f"Slurm has not answered for {self.settings.patience} s. Job {info.external_jobid}"
            " may still run: the same command takes it over when Slurm answers again.\n",
        )

    # --- the end

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:  # noqa: ARG002
        """Cancel every job of this run.

        Snakemake's own list lacks those that are being checked at this moment, and a batch
        whose sbatch was interrupted: ours and the tag have them.
        """
        self._outbox.stop(_CANCEL_PATIENCE)
        if not self._live and not self._sender.has_submitted:
            return
        try:
            with_patience(self._cancel_all, patience=_CANCEL_PATIENCE, on_retry=self._say_retry)
        except GaveUpError as error:
            ids = " ".join(sorted(entry.job_id for entry in list(self._live.values())))
            self.logger.error(f"could not cancel: {error}\nWhen Slurm answers: scancel {ids}")
            return
        for entry in list(self._live.values()):
            self._end(entry, "cancelled")

    def _cancel_all(self) -> None:
        """By tag: an id alone might be another cluster's job."""
        live = list(self._live.values())  # the polling thread goes on
        taken = {entry.tag for entry in live if entry.run != self._journal.run}
        found = slurm.tagged([self._journal.run, *taken])
        ours = {entry.job_id for entry in live}
        # The whole array where all of it is this run's, single tasks of one that was taken over.
        ids = {
            job_id if job.comment in taken else job_id.partition("_")[0]
            for job_id, job in found.items()
            if job.comment not in taken or job_id in ours
        }
        slurm.cancel(sorted(ids))

    def shutdown(self) -> None:
        self._outbox.stop(_CANCEL_PATIENCE)
        super().shutdown()
        if self._journal.is_closed:
            return
        self._sender.forget_unused()
        if not self._live:
            self._journal.close_run(self._journal.run)
        self._journal.close()


def _take_sigterm() -> None:
    """SIGTERM ends the run as Ctrl-C does; Snakemake's own way is to wait for running jobs.

    Snakemake sets its handler after it has made the executor, so this is done at the first jobs.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
