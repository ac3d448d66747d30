"""The executor: Snakemake's ready jobs in, Slurm arrays out, results and failures back."""

import asyncio
import atexit
import os
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

from snakemake_interface_common.exceptions import ApiError, WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from snakemake_executor_plugin_submitit import efficiency, partitions, reattach, slurm, status
from snakemake_executor_plugin_submitit.exclusion import NodeGuard
from snakemake_executor_plugin_submitit.journal import (
    Entry,
    JobJournal,
    JournalError,
    is_name_of,
    prune,
)
from snakemake_executor_plugin_submitit.logs import Follower, keep, last_lines, remove, remove_old
from snakemake_executor_plugin_submitit.outbox import Outbox
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience
from snakemake_executor_plugin_submitit.polling import Poller, is_named
from snakemake_executor_plugin_submitit.resources import ResourceError
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.watching import JobWatcher, WatchedJob
from snakemake_executor_plugin_submitit.work import Prepared, prepare

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """A handler for signals that end this process: the first one becomes a KeyboardInterrupt.

    Ctrl-C cancels the jobs; SIGTERM (a rebooted login node) and SIGHUP (a closed terminal) leave
    them running. Further signals are ignored: each would be a traceback in the middle of
    Snakemake's own end.
    """

    def __init__(self) -> None:
        self.by: signal.Signals | None = None

    @property
    def leaves_jobs(self) -> bool:
        """Whether the jobs should keep running."""
        return self.by in (signal.SIGTERM, signal.SIGHUP)

    def listen(self) -> None:
        """Install the handlers; repeated after Snakemake has taken SIGTERM, for which it would
        wait."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NUMBERS:
            # Ignored by whoever started us: nohup, or a shell that put us into the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self.by is None:
            self.by = signal.Signals(number)
            raise KeyboardInterrupt


def same_command(argv: Sequence[str], *, reruns_incomplete: bool) -> str:
    """The shell command that continues this run's jobs.

    `reruns_incomplete`: whether an option or profile told Snakemake to rerun outputs that are not
    recorded as complete.
    """
    name = PurePath(argv[0]).name
    program = "snakemake" if name in ("__main__.py", "snakemake") else argv[0]
    more = () if reruns_incomplete else ("--rerun-incomplete",)
    return shlex.join([program, *argv[1:], *more])


# Interval between checks for result files; each costs one directory listing, no call to Slurm.
_FILE_SECONDS = 0.5
# After Ctrl-C a silent Slurm is not awaited longer: the ids to cancel are printed.
_CANCEL_PATIENCE = 60.0
# If Slurm enforces memory without a state for it, its message is among these last lines.
_MEMORY_LINES = 20
_RUNS_KEPT = 20
_FAILURES_NAMED = 10


class Executor(RemoteExecutor):  # type: ignore[misc]  # untyped base
    """The executor, which runs each job as `snakemake` on a node; see docs/further.md."""

    def __post_init__(self) -> None:
        if self.workflow.remote_execution_settings.immediate_submit:
            raise WorkflowError(
                "--immediate-submit is not for this executor: it submits a job when its inputs are"
                " there, and nothing would wait for the jobs. Leave the option out."
            )
        self.settings: ExecutorSettings = self.workflow.executor_settings or ExecutorSettings()
        self._stop = EndSignals()
        self._stop.listen()
        self._is_silent = False
        # By rule and wildcards. Snakemake's own last lines would hide them: they come after those.
        self._failures: dict[str, str] = {}
        atexit.register(self._say_failures)
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
        # Snakemake imports this module in each job too, which has no use for submitit.
        from snakemake_executor_plugin_submitit.sending import JobSender

        self._journal, candidates = self._open()
        poller = Poller(
            seconds=self.workflow.remote_execution_settings.seconds_between_status_checks,
            patience=self.settings.patience,
            say=self.logger.warning,
            run=self._journal.run,
            note_name=self._note_name,
        )
        self._watcher = JobWatcher(
            self._base, self.settings, poller, self._nodes, logs=self._logs, logger=self.logger
        )
        self._sender = JobSender(
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
        if ignored := slurm.ignored_choices(os.environ):
            self.logger.warning(
                f"ignored when jobs are submitted: {', '.join(ignored)} of this shell; give"
                " account, partition, cluster and the like as resources, such as"
                " --default-resources slurm_account=NAME. Jobs still find them."
            )

    def _open(self) -> tuple[JobJournal, reattach.Candidates]:
        if "\\" in str(self._base):
            raise WorkflowError(
                f"--submitit-folder {self._base}: expected a path without a backslash, in which"
                " Slurm would not put the job's id into a log's name"
            )
        try:
            journal = JobJournal(self._base)
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

    def _earlier_jobs(self, journal: JobJournal) -> list[reattach.Candidate]:
        return with_patience(
            lambda: reattach.find(journal),
            patience=self.settings.patience,
            on_retry=self._say_retry,
        )

    @property
    def cores(self) -> str:
        """The resources of a job are its node's own, whatever the submitting host has."""
        return "all"

    def additional_general_args(self) -> str:
        """Options that keep a job's Snakemake from repeating the submitting one's output."""
        is_verbose = self.workflow.output_settings.verbose
        return "" if is_verbose else "--quiet host progress rules reason"

    # --- submission

    def run_job(self, job: Any) -> None:
        self._put([job])

    def run_jobs(self, jobs: Sequence[Any]) -> None:
        # All ready jobs of a round: one by one, as the base class does, none could share an array.
        for job in jobs:
            self.run_job_pre(job)
        self._put(jobs)

    def _put(self, jobs: Sequence[Any]) -> None:
        """Submit jobs; each is reported as submitted or refused, or it would keep its place in
        --jobs."""
        self._stop.listen()
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
        """Report a job that Slurm has accepted."""
        self._live.add(entry)
        if self.settings.efficiency_report:
            self._labels.setdefault(entry.cluster, {})[entry.job_id] = entry.label
        if self._follower is not None:
            log = entry.log_file(self._base)
            shown = f"{entry.label} {entry.job_id}"
            self._follower.add(_key(entry), shown, log, from_end=taken_over)
        self._watcher.poller.note_progress()
        info = SubmittedJobInfo(job, external_jobid=entry.job_id, aux={"watch": WatchedJob(entry)})
        # Last: from here on the polling thread may ask about the job.
        self.report_job_submission(info)

    def refused(self, job: Any, words: str) -> None:
        """Report a job that cannot be submitted."""
        self.report_job_error(SubmittedJobInfo(job), msg=f"{words}\n")

    def living(self) -> int:
        """The number of this run's jobs in Slurm."""
        return len(self._live)

    def _note_name(self, entry: Entry, name: str) -> None:
        """Record another name that Slurm shows for a job of ours, by which the next run must find
        it."""
        self._watcher.say_once(
            f"Slurm shows job {entry.job_id} as {name!r}, submitted as {entry.name!r}; it is known"
            " by its id (a plugin of this cluster, or scontrol, has renamed it)"
        )
        try:
            self._journal.renamed(entry, name)
        except OSError as error:
            self._watcher.say_once(f"cannot write the journal: {error}")

    def _say_retry(self, words: str, seconds: float) -> None:
        self.logger.warning(f"Slurm: {words}; trying again in {seconds:g} s")

    # --- status

    async def sleep(self) -> None:
        """The interval between checks of the files; Snakemake's own option is for the poller."""
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
                self._failures.pop(watch.entry.label, None)
                self._end(watch.entry, "succeeded")
                self.report_job_success(info)
            elif judgement.outcome == "failed":
                self._end(watch.entry, "failed")
                self._report_failure(info, judgement.reason)
            else:
                yield info
        if self._watcher.poller.is_given_up and not self._is_silent:
            self._is_silent = True
            words = f"Slurm has not answered for {self.settings.patience} s"
            self.workflow.scheduler.executor_error_callback(WorkflowError(words))

    def _end(self, entry: Entry, outcome: str) -> None:
        if self._follower is not None:
            self._follower.remove(_key(entry))
        self._live.discard(entry)
        try:
            self._journal.end(entry, outcome)
        except OSError as error:  # the next run looks at the job again, and finds its result
            self._watcher.say_once(f"cannot note the end of Slurm job {entry.job_id}: {error}")
        else:
            self._tidy(entry, is_success=outcome == "succeeded")
        self._watcher.poller.note_progress()

    def _tidy(self, entry: Entry, *, is_success: bool) -> None:
        """Move the log to its readable place, or remove it."""
        log, link = entry.log_file(self._base), Path(entry.log)
        try:
            if is_success and not self.settings.keep_successful_logs:
                remove(log, link, self._logs)
            else:
                keep(log, link, self._logs)
        except OSError as error:
            self._watcher.say_once(f"cannot tidy up after Slurm job {entry.job_id}: {error}")

    def _report_failure(self, info: SubmittedJobInfo, reason: str) -> None:
        entry: Entry = info.aux["watch"].entry
        log = Path(entry.log)
        lines = last_lines(log, max(self.settings.log_lines, _MEMORY_LINES))
        reason += status.memory_remark(reason, lines)
        shown = lines[-self.settings.log_lines :] if self.settings.log_lines else []
        self._failures[entry.label] = status.failure_line(
            entry.label, entry.job_id, reason, str(log)
        )
        message = status.failure_message(entry.job_id, reason, str(log), shown)
        self.report_job_error(info, msg=message, aux_logs=[str(log)])

    def _say_failures(self) -> None:
        lines = list(self._failures.values())
        rest = len(lines) - _FAILURES_NAMED
        more = [f"failed: {rest} more, see above"] if rest > 0 else []
        for line in [*more, *lines[-_FAILURES_NAMED:]]:
            print(line, file=sys.stderr)

    # --- the end

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:  # noqa: ARG002
        """Cancel every job of this run, or leave them all running if only the process is ended.

        Snakemake's own list lacks those that are being checked at this moment, and a batch
        whose sbatch was interrupted: ours and the name have them.
        """
        self._outbox.stop(_CANCEL_PATIENCE)
        if self._leaves_jobs or not (self._live or self._sender.has_submitted):
            return
        try:
            with_patience(self._cancel_all, patience=_CANCEL_PATIENCE, on_retry=self._say_retry)
        except GaveUpError as error:
            ids = " ".join(sorted(entry.job_id for entry in list(self._live)))
            self.logger.error(f"could not cancel: {error}\nWhen Slurm answers: scancel {ids}")
            return
        for entry in list(self._live):
            self._end(entry, "cancelled")

    @property
    def _leaves_jobs(self) -> bool:
        """Whether this run ends without its jobs, which the next run takes over."""
        return self._is_silent or self._stop.leaves_jobs

    def _leave(self) -> None:
        """
        Raises:
            ApiError: always. After an end without an exception Snakemake would remove folders that
                are empty, in which running jobs are about to write.
        """
        why = self._stop.by.name if self._stop.by else "Slurm does not answer"
        command = same_command(
            sys.argv, reruns_incomplete=self.workflow.dag_settings.force_incomplete
        )
        raise ApiError(
            f"{why}: {len(self._live)} job(s) of this run continue in Slurm. To take them over,"
            f" run: {command}"
        )

    def _cancel_all(self) -> None:
        """Cancel own jobs by their ids, and those taken over if Slurm shows them under their names.

        Also cancel by this run's names, as there may be a batch whose sbatch was interrupted.
        """
        live = list(self._live)  # the polling thread goes on
        for cluster in self._clusters():
            members = [entry for entry in live if entry.cluster == cluster]
            ids = {entry.job_id for entry in members if entry.run == self._journal.run}
            taken = {e.job_id: e for e in members if e.run != self._journal.run}
            try:
                unfinished = slurm.unfinished(cluster)
            except slurm.SlurmError:
                slurm.cancel(sorted(ids), cluster=cluster)  # an id is enough
                raise
            for job_id, job in unfinished.items():
                entry = taken.get(job_id)
                if is_name_of(self._journal.run, job.name) or (entry and is_named(entry, job)):
                    ids.add(job_id)
            # The whole array where all of it is this run's, single tasks of one taken over.
            whole = {i if i in taken else i.partition("_")[0] for i in ids}
            slurm.cancel(sorted(whole), cluster=cluster)

    def _clusters(self) -> set[str]:
        """All clusters that may have a job of this run."""
        return self._sender.clusters | {entry.cluster for entry in list(self._live)}

    def _cancel_leftovers(self) -> None:
        """Cancel ended jobs that Slurm has requeued: held ones would stay in the queue forever."""
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
        if not self._live:
            self._close()
        # With jobs in it, a journal stays open for the run that takes them over.
        self._journal.close()
        if self._live and self._leaves_jobs:
            self._leave()

    def _close(self) -> None:
        try:
            self._cancel_leftovers()
        except slurm.SlurmError as error:
            self.logger.warning(f"cannot see whether a job was left in the queue: {error}")
        if self._nodes.lost:
            nodes = ", ".join(sorted(self._nodes.lost))
            self.logger.warning(f"nodes that were lost in this run: {nodes}")
        for cluster, labels in self._labels.items():
            efficiency.report(labels, self.logger.info, cluster)
        self._journal.close_run(self._journal.run)


def _key(entry: Entry) -> str:
    return f"{entry.run}/{entry.token}"
