"""The executor: Snakemake's ready jobs in, Slurm arrays out, results and failures back."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from snakemake_executor_plugin_submitit import efficiency, partitions, reattach, slurm, status
from snakemake_executor_plugin_submitit.exclusion import NodeGuard
from snakemake_executor_plugin_submitit.journal import (
    Entry,
    Journal,
    JournalError,
    is_name_of,
    prune,
)
from snakemake_executor_plugin_submitit.logs import Follower, keep, last_lines, remove, remove_old
from snakemake_executor_plugin_submitit.outbox import Outbox
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience
from snakemake_executor_plugin_submitit.polling import Poller
from snakemake_executor_plugin_submitit.resources import ResourceError
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.watching import Watch, Watcher
from snakemake_executor_plugin_submitit.work import Prepared, prepare

# Result files are looked for this often; it costs one directory listing, no call to Slurm.
_FILE_SECONDS = 0.5
# Whoever pressed Ctrl-C does not wait longer for a silent Slurm: the ids to cancel are printed.
_CANCEL_PATIENCE = 60.0
# Where Slurm enforces memory without saying so in the state, its word is among these last lines.
_MEMORY_LINES = 20
_RUNS_KEPT = 20


class Executor(RemoteExecutor):  # type: ignore[misc]  # untyped base
    """Runs each job as `snakemake` on a node; see docs/further.md."""

    def __post_init__(self) -> None:
        self.settings: ExecutorSettings = self.workflow.executor_settings or ExecutorSettings()
        file = partitions.config_file(self.settings.partition_config, os.environ)
        self._partitions = partitions.read(file) if file else ()
        self._base = Path(self.settings.folder).absolute()
        self._logs = Path(self.settings.logdir or self._base / "logs").absolute()
        # The outbox's thread adds to it, Snakemake's and the polling one remove.
        self._live: set[Entry] = set()
        follow = self.settings.follow
        self._follower = None if follow == "none" else Follower(single=follow == "single")
        self._nodes = NodeGuard(self.logger.warning)
        self._labels: dict[str, dict[str, str]] = {}
        poller = Poller(
            seconds=self.workflow.remote_execution_settings.seconds_between_status_checks,
            patience=self.settings.patience,
            say=self.logger.warning,
        )
        self._watcher = Watcher(self._base, self.settings, poller, self._nodes, self.logger)
        # Snakemake imports this module in each job too, which has no use for submitit.
        from snakemake_executor_plugin_submitit.sending import Sender

        self._journal, candidates = self._open()
        self._sender = Sender(
            self._journal,
            self.settings,
            candidates,
            self._nodes,
            self._logs,
            report=self,
            logger=self.logger,
        )
        self._outbox: Outbox[Prepared] = Outbox(self._send)
        self._sender.sleep = self._outbox.sleep

    def _open(self) -> tuple[Journal, reattach.Candidates]:
        if "\\" in str(self._base):
            raise WorkflowError(
                f"--submitit-folder {self._base}: expected a path without a backslash, in which"
                " Slurm would not put the job's id into a log's name"
            )
        try:
            journal = Journal(self._base)
            found = [] if self.settings.no_reattach else self._earlier_jobs(journal)
            prune(self._base, keep=_RUNS_KEPT)
            if self.settings.delete_logfiles_older_than > 0:
                remove_old(self._logs, self.settings.delete_logfiles_older_than)
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
        if found:
            self.logger.info(f"{len(found)} jobs of an earlier run may be taken over")
        return journal, reattach.Candidates(found)

    def _earlier_jobs(self, journal: Journal) -> list[reattach.Candidate]:
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
        # All ready jobs of a round: one by one, as the base class does, none could share an array.
        for job in jobs:
            self.run_job_pre(job)
        self._put(jobs)

    def _put(self, jobs: Sequence[Any]) -> None:
        """Every job ends up reported, submitted or refused: else it keeps its place in --jobs."""
        _take_sigterm()
        defaults = self.settings.resource_defaults
        prepared = []
        for job in jobs:
            try:
                ready = prepare(job, self.format_job_exec(job), defaults, self._partitions)
            except ResourceError as error:
                self.refused(job, str(error))
                continue
            prepared.append(ready)
            for words in ready.warnings:
                self._watcher.say_once(words)
        self._outbox.put(prepared)

    def _send(self, jobs: Sequence[Prepared]) -> None:
        self._sender.send(jobs)

    def submitted(self, job: Any, entry: Entry, *, taken_over: bool) -> None:
        """The sender's report of a job that Slurm has."""
        self._live.add(entry)
        if self.settings.efficiency_report:
            self._labels.setdefault(entry.cluster, {})[entry.job_id] = entry.label
        if self._follower is not None:
            log = entry.log_file(self._base)
            shown = f"{entry.label} {entry.job_id}"
            self._follower.add(_key(entry), shown, log, from_end=taken_over)
        self._watcher.poller.note_progress()
        info = SubmittedJobInfo(job, external_jobid=entry.job_id, aux={"watch": Watch(entry)})
        # Last: from here on the polling thread may ask about the job.
        self.report_job_submission(info)

    def refused(self, job: Any, words: str) -> None:
        """The sender's report of a job that cannot be submitted."""
        self.report_job_error(SubmittedJobInfo(job), msg=f"{words}\n")

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
        watches = [info.aux["watch"] for info in active_jobs]
        judgements = await self._watcher.look(watches, self.status_rate_limiter)
        if self._follower is not None:
            self._follower.poll()
        for info, watch, judgement in zip(active_jobs, watches, judgements, strict=True):
            if judgement.outcome == "succeeded":
                self._end(watch.entry, "succeeded")
                self.report_job_success(info)
            elif judgement.outcome == "failed":
                self._end(watch.entry, "failed")
                self._report_failure(info, judgement.reason)
            elif self._watcher.poller.is_given_up:
                self._report_silence(info)
            else:
                yield info

    def _end(self, entry: Entry, outcome: str) -> None:
        if self._follower is not None:
            self._follower.remove(_key(entry))
        self._live.discard(entry)
        try:
            self._journal.end(entry, outcome)
        except OSError as error:  # the next run looks at the job again, and finds its result
            self._watcher.say_once(f"cannot write the journal: {error}")
        else:
            self._tidy(entry, is_success=outcome == "succeeded")
        self._watcher.poller.note_progress()

    def _tidy(self, entry: Entry, *, is_success: bool) -> None:
        """Remove an ended job's files, but for a log that somebody may want to read."""
        log, link = entry.log_file(self._base), Path(entry.log)
        try:
            # The first to go: without it a job that Slurm requeues after its end runs nothing.
            entry.job_file(self._base).unlink(missing_ok=True)
            entry.result_file(self._base).unlink(missing_ok=True)
            if is_success and not self.settings.keep_successful_logs:
                remove(log, link, self._logs)
            else:
                keep(log, link)
        except OSError as error:
            self._watcher.say_once(f"cannot tidy up after Slurm job {entry.job_id}: {error}")

    def _report_failure(self, info: SubmittedJobInfo, reason: str) -> None:
        entry: Entry = info.aux["watch"].entry
        log = Path(entry.log)
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
        whose sbatch was interrupted: ours and the name have them.
        """
        self._outbox.stop(_CANCEL_PATIENCE)
        if not self._live and not self._sender.has_submitted:
            return
        try:
            with_patience(self._cancel_all, patience=_CANCEL_PATIENCE, on_retry=self._say_retry)
        except GaveUpError as error:
            ids = " ".join(sorted(entry.job_id for entry in list(self._live)))
            self.logger.error(f"could not cancel: {error}\nWhen Slurm answers: scancel {ids}")
            return
        for entry in list(self._live):
            self._end(entry, "cancelled")

    def _cancel_all(self) -> None:
        """By name: an id alone might be another cluster's job."""
        live = list(self._live)  # the polling thread goes on
        for cluster in self._clusters():
            taken = {e.job_id: e.name for e in live if e.cluster == cluster}
            ids = {
                # The whole array where all of it is this run's, single tasks of one taken over.
                job_id.partition("_")[0] if is_name_of(self._journal.run, job.name) else job_id
                for job_id, job in slurm.unfinished(cluster).items()
                if is_name_of(self._journal.run, job.name) or taken.get(job_id) == job.name
            }
            slurm.cancel(sorted(ids), cluster=cluster)

    def _clusters(self) -> set[str]:
        """Every cluster that has or may have a job of this run."""
        return self._sender.clusters | {entry.cluster for entry in list(self._live)}

    def _cancel_leftovers(self) -> None:
        """Ended jobs that Slurm has requeued: held ones would stay in the queue for ever."""
        for cluster in self._sender.clusters:
            ids = [
                job_id
                for job_id, job in slurm.unfinished(cluster).items()
                if job.waits and is_name_of(self._journal.run, job.name)
            ]
            slurm.cancel(sorted(ids), cluster=cluster)

    def shutdown(self) -> None:
        self._outbox.stop(_CANCEL_PATIENCE)
        super().shutdown()
        if self._journal.is_closed:
            return
        self._sender.forget_unused()
        # Jobs that were given up are still in it: their journal stays open for the run that
        # takes them over.
        if not self._live:
            self._close()
        self._journal.close()

    def _close(self) -> None:
        try:
            self._cancel_leftovers()
        except slurm.SlurmError as error:
            self.logger.warning(f"cannot see whether a job was left in the queue: {error}")
        if self._nodes.lost:
            nodes = ", ".join(sorted(self._nodes.lost))
            self.logger.warning(f"nodes that were lost in this run: {nodes}")
        path = efficiency.report_path(self.settings.efficiency_report_path, self._journal.run)
        for cluster, labels in self._labels.items():
            report = path.with_stem(f"{path.stem}_{cluster}") if cluster else path
            threshold = self.settings.efficiency_threshold
            efficiency.report(labels, report, threshold, self.logger.info, cluster)
        self._journal.close_run(self._journal.run)


def _key(entry: Entry) -> str:
    return f"{entry.run}/{entry.token}"


def _take_sigterm() -> None:
    """SIGTERM ends the run as Ctrl-C does; Snakemake's own way is to wait for running jobs.

    Snakemake sets its handler after it has made the executor, so this is done at the first jobs.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
