"""The executor: Snakemake's ready jobs in, Slurm arrays out, results and failures back."""

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from snakemake_executor_plugin_submitit import reattach, slurm, status
from snakemake_executor_plugin_submitit.journal import Entry, Journal, JournalError, prune
from snakemake_executor_plugin_submitit.node import Result, read_result
from snakemake_executor_plugin_submitit.resources import ResourceError, slurm_parameters
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.submit import Batch, SubmitError, submit, with_patience

# Result files are looked for this often; it costs one directory listing, no call to Slurm.
_FILE_SECONDS = 0.5
# squeue is asked again this soon when a failure on file waits for Slurm's word.
_SOON_SECONDS = 2.0
_CANCEL_PATIENCE = 60.0
_RUNS_KEPT = 20
_LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class _Prepared:
    """A job that is ready for sbatch."""

    job: Any
    key: str
    fingerprint: str


@dataclass
class _Watch:
    """A submitted job under watch; `unclear_since` is monotonic seconds."""

    entry: Entry
    unclear_since: float | None = None


class Executor(RemoteExecutor):  # type: ignore[misc]  # untyped base
    """Runs each job as `snakemake` on a node; see docs/executor.md."""

    def __post_init__(self) -> None:
        self.settings: ExecutorSettings = self.workflow.executor_settings or ExecutorSettings()
        self.next_seconds_between_status_checks = _FILE_SECONDS
        self._base = Path(self.settings.folder).absolute()
        self._live: dict[str, Entry] = {}
        self._batches = 0
        self._asked = float("-inf")
        self._silent = False
        self._candidates: dict[str, reattach.Candidate] = {}
        try:
            self._journal = Journal(self._base)
            if not self.settings.no_reattach:
                self._candidates = reattach.find(self._journal)
            prune(self._base, keep=_RUNS_KEPT)
        except OSError as error:
            raise WorkflowError(f"cannot use --submitit-folder {self._base}: {error}") from error
        except (slurm.SlurmError, JournalError) as error:
            raise WorkflowError(
                f"cannot find out about the jobs of an earlier run: {error}\n"
                "Run again when Slurm answers; --submitit-no-reattach ignores those jobs."
            ) from error
        if self._candidates:
            self.logger.info(f"{len(self._candidates)} jobs of an earlier run may be taken over")

    @property
    def cores(self) -> str:
        """What a job may use: its node's own, whatever the submitting host has."""
        return "all"

    # --- submission

    def run_job(self, job: Any) -> None:
        self._run([job])

    def run_jobs(self, jobs: Sequence[Any]) -> None:
        for job in jobs:
            self.run_job_pre(job)
        self._run(jobs)

    def _run(self, jobs: Sequence[Any]) -> None:
        """Every job ends up reported: as submitted, or as an error."""
        groups: dict[str, list[_Prepared]] = defaultdict(list)
        for job in jobs:
            prepared = _Prepared(job, *reattach.identity(job))
            try:
                parameters = slurm_parameters(dict(job.resources.items()), _threads(job))
            except ResourceError as error:
                self.report_job_error(SubmittedJobInfo(job), msg=f"{error}\n")
                continue
            if not self._take_over(prepared):
                groups[json.dumps(parameters, sort_keys=True)].append(prepared)
        for text, members in groups.items():
            for first in range(0, len(members), self.settings.array_size):
                chunk = members[first : first + self.settings.array_size]
                self._submit(chunk, json.loads(text))

    def _submit(self, jobs: Sequence[_Prepared], parameters: dict[str, Any]) -> None:
        batch = self._batch(jobs, parameters)
        self._journal.batch(batch.tag)
        try:
            job_ids = with_patience(
                lambda: submit(batch, self._journal.folder),
                patience=self.settings.submit_patience,
                clean_up=lambda: slurm.cancel(sorted(slurm.tagged(batch.tag))),
                on_retry=self._say_retry,
            )
        except SubmitError as error:
            for prepared in jobs:
                self.report_job_error(
                    SubmittedJobInfo(prepared.job), msg=f"sbatch did not accept it: {error}\n"
                )
            return
        now = time.time()
        entries = [
            Entry(p.key, p.fingerprint, job_id, path.stem, batch.tag, self._journal.run, now)
            for p, job_id, (_, path) in zip(jobs, job_ids, batch.work, strict=True)
        ]
        self._journal.jobs(entries)
        main = job_ids[0].partition("_")[0]
        self.logger.info(f"Slurm job {main} has {len(jobs)} job(s): {batch.name}")
        for prepared, entry in zip(jobs, entries, strict=True):
            self._watch(prepared.job, entry)

    def _batch(self, jobs: Sequence[_Prepared], parameters: dict[str, Any]) -> Batch:
        self._batches += 1
        tag = f"{self._journal.run}.{self._batches}"
        results = self._journal.folder / "results"
        return Batch(
            name="+".join(dict.fromkeys(prepared.job.name for prepared in jobs)),
            tag=tag,
            parameters=parameters,
            work=[
                (self.format_job_exec(prepared.job), results / f"{self._batches}-{index}.json")
                for index, prepared in enumerate(jobs)
            ],
        )

    def _watch(self, job: Any, entry: Entry) -> None:
        self._live[entry.token] = entry
        info = SubmittedJobInfo(job, external_jobid=entry.job_id, aux={"watch": _Watch(entry)})
        self.report_job_submission(info)

    def _say_retry(self, words: str, seconds: float) -> None:
        self.logger.warning(f"Slurm: {words}; trying again in {seconds:g} s")

    # --- jobs of an earlier run

    def _take_over(self, prepared: _Prepared) -> bool:
        """Watch an earlier run's job instead of submitting; False when there is none to take."""
        candidate = self._candidates.pop(prepared.key, None)
        if candidate is None:
            return False
        entry = candidate.entry
        inputs = [str(path) for path in prepared.job.input]
        if reattach.is_stale(candidate, prepared.fingerprint, inputs):
            self._drop(candidate)
            return False
        what = "still runs" if candidate.live else "has ended well"
        self.logger.info(f"took over Slurm job {entry.job_id} of an earlier run: it {what}")
        self._watch(prepared.job, entry)
        return True

    def _drop(self, candidate: reattach.Candidate) -> None:
        """End an outdated job first: two of them would write the same files."""
        entry = candidate.entry
        if candidate.live:
            self.logger.info(f"cancelling outdated Slurm job {entry.job_id} of an earlier run")
            gone = reattach.cancel_and_wait(
                entry, seconds=_CANCEL_PATIENCE, sleep=time.sleep, clock=time.monotonic
            )
            if not gone:
                raise WorkflowError(f"outdated Slurm job {entry.job_id} does not end; scancel it")
        self._journal.end(entry, "outdated")

    # --- status

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncIterator[SubmittedJobInfo]:
        results = self._results(active_jobs)
        states = await self._states(active_jobs, results)
        for info in active_jobs:
            watch: _Watch = info.aux["watch"]
            result = results.get(watch.entry)
            judgement = self._judge(watch, result, states)
            if judgement.outcome == "succeeded":
                self._end(watch.entry, "succeeded")
                self.report_job_success(info)
            elif judgement.outcome == "failed":
                self._end(watch.entry, "failed")
                self._report_failure(info, judgement.reason)
            else:
                yield info

    def _results(self, active_jobs: Iterable[SubmittedJobInfo]) -> dict[Entry, Result]:
        """Results by entry; one listing a folder also refreshes a network file system's cache."""
        entries = [info.aux["watch"].entry for info in active_jobs]
        present = {
            run: set(os.listdir(self._base / run / "results"))
            for run in {entry.run for entry in entries}
        }
        found = {
            entry: read_result(entry.result_file(self._base))
            for entry in entries
            if f"{entry.token}.json" in present[entry.run]
        }
        return {entry: result for entry, result in found.items() if result is not None}

    async def _states(
        self, active_jobs: Iterable[SubmittedJobInfo], results: dict[Entry, Result]
    ) -> dict[str, slurm.JobState] | None:
        """Slurm's word about the jobs without a success; None when it is not asked or silent."""
        entries = [info.aux["watch"].entry for info in active_jobs]
        open_entries = [e for e in entries if e not in results or results[e].exit_code]
        soon = any(entry in results for entry in open_entries)
        interval = min(_SOON_SECONDS, self.settings.poll_seconds)
        interval = interval if soon else self.settings.poll_seconds
        if not open_entries or time.monotonic() - self._asked < interval:
            return None
        ids = {entry.job_id for entry in open_entries}
        async with self.status_rate_limiter:
            states = await asyncio.to_thread(self._ask, ids)
        self._asked = time.monotonic()
        return states

    def _ask(self, ids: set[str]) -> dict[str, slurm.JobState] | None:
        try:
            states = slurm.states(ids)
        except slurm.SlurmError as error:
            if not self._silent:
                self.logger.warning(f"no word from Slurm, asking on: {error}")
            self._silent = True
            return None
        self._silent = False
        return states

    def _judge(
        self, watch: _Watch, result: Result | None, states: dict[str, slurm.JobState] | None
    ) -> status.Judgement:
        """`status.judge`, with an unclear state that has lasted too long counted as failed."""
        if states is None:
            succeeded = result is not None and result.exit_code == 0
            return status.Judgement("succeeded" if succeeded else "running")
        judgement = status.judge(result, states.get(watch.entry.job_id))
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
        self._live.pop(entry.token, None)
        self._journal.end(entry, outcome)

    def _report_failure(self, info: SubmittedJobInfo, reason: str) -> None:
        entry: Entry = info.aux["watch"].entry
        log = entry.log_file(self._base)
        lines = _last_lines(log, self.settings.log_lines)
        message = status.failure_message(entry.job_id, reason, str(log), lines)
        self.report_job_error(info, msg=message, aux_logs=[str(log)])

    # --- the end

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:  # noqa: ARG002
        """Cancel every job of this run.

        Snakemake's own list lacks those that are being checked at this moment, and a batch
        whose sbatch was interrupted: ours and the tag have them.
        """
        if not self._live and not self._batches:
            return
        try:
            with_patience(
                self._cancel_all,
                patience=_CANCEL_PATIENCE,
                clean_up=lambda: None,
                on_retry=self._say_retry,
            )
        except SubmitError as error:
            ids = " ".join(sorted(entry.job_id for entry in self._live.values()))
            self.logger.error(f"could not cancel: {error}\nWhen Slurm answers: scancel {ids}")
            return
        for entry in list(self._live.values()):
            self._end(entry, "cancelled")

    def _cancel_all(self) -> list[str]:
        """scancel by array where the whole array is this run's."""
        ids = set(slurm.tagged(self._journal.run))
        ids |= {entry.job_id for entry in self._live.values() if entry.run == self._journal.run}
        mine = {job_id.partition("_")[0] for job_id in ids}
        taken = {entry.job_id for entry in self._live.values() if entry.run != self._journal.run}
        slurm.cancel(sorted(mine | taken))
        return sorted(mine | taken)

    def shutdown(self) -> None:
        super().shutdown()
        if self._journal.is_closed:
            return
        for candidate in self._candidates.values():
            if not candidate.live:  # its outputs were found complete
                self._journal.end(candidate.entry, "not asked for")
        if not self._live:
            self._journal.close_run(self._journal.run)
        self._journal.close()


def _threads(job: Any) -> int:
    """A group's `_cores` is what its jobs need at once."""
    return int(job.resources.get("_cores", 1)) if job.is_group() else int(job.threads)


def _last_lines(path: Path, count: int) -> list[str]:
    """The log's last lines; none when it cannot be read: Slurm may not have made it."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _LOG_TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-count:] if count else []
