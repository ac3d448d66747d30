"""The sending of ready jobs: take over an earlier run's, submit the others."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from snakemake_executor_plugin_submitit import reattach, slurm
from snakemake_executor_plugin_submitit.accounts import Accounts, guess, wants_account
from snakemake_executor_plugin_submitit.exclusion import NodeGuard, nodes_of_file, with_excluded
from snakemake_executor_plugin_submitit.journal import Entry, JobJournal, name_ending
from snakemake_executor_plugin_submitit.outbox import StoppedError
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience
from snakemake_executor_plugin_submitit.resources import Parameters, ResourceError
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.submit import (
    Batch,
    Submitted,
    is_array_too_large,
    is_queue_full,
    job_comment,
    job_name,
    submit,
)
from snakemake_executor_plugin_submitit.work import Prepared

_T = TypeVar("_T")

# Slurm's default MaxArraySize allows so many; the cluster is asked only when there are more.
_USUAL_ARRAY = 1000
_CANCEL_PATIENCE = 60.0


class Report(Protocol):
    """The receiver of reports on jobs."""

    def submitted(self, job: Any, entry: Entry, *, taken_over: bool) -> None: ...
    def refused(self, job: Any, words: str) -> None: ...
    def living(self) -> int: ...


class JobSender:
    """The sender of jobs; everything but `forget_unused` runs in the outbox's thread."""

    def __init__(
        self,
        journal: JobJournal,
        settings: ExecutorSettings,
        candidates: reattach.Candidates,
        nodes: NodeGuard,
        logs: Path,
        *,
        report: Report,
        logger: Any,
    ) -> None:
        self.sleep: Callable[[float], None] = time.sleep
        self._journal = journal
        self._settings = settings
        self._candidates = candidates
        self._nodes = nodes
        self._logs = logs
        self._report = report
        self._logger = logger
        self._batches = 0
        self.clusters: set[str] = set()
        self._accounts = Accounts()
        self._guessed: str | None = None
        self._largest = settings.array_size
        # Jobs that go out at once after a full queue; None: as many as there are.
        self._room: int | None = None
        self._is_full = self._has_said_full = False

    @property
    def has_submitted(self) -> bool:
        """Whether there may be a job of this run."""
        return self._batches > 0

    def send(self, jobs: Sequence[Prepared]) -> None:
        """Send jobs; each is reported, unless the run is being cancelled.

        Raises:
            StoppedError: it is.
        """
        groups: dict[str, list[Prepared]] = defaultdict(list)
        for prepared in jobs:
            try:
                if not self._take_over(prepared):
                    parameters = self._parameters(prepared)
                    # By their text, as a dict cannot be a key.
                    groups[json.dumps([parameters, prepared.checkpoints])].append(prepared)
            except StoppedError:
                raise
            except Exception as error:  # noqa: BLE001  # Snakemake must hear of it, whatever it is
                self._report.refused(prepared.job, _words(error))
        for text, members in groups.items():
            self._send_group(members, json.loads(text)[0])

    def _parameters(self, prepared: Prepared) -> Parameters:
        """The job's own, and the nodes that it must avoid as things are now."""
        nodes = set(self._nodes.lost)
        parameters = dict(prepared.parameters)
        if prepared.accounts:
            parameters["account"] = self._accounts.chosen(prepared.accounts)
        elif self._guessed:
            parameters.setdefault("account", self._guessed)
        if prepared.exclude_file is not None:
            nodes.update(nodes_of_file(prepared.exclude_file))
        if prepared.node_file is not None:
            wanted = int(parameters.get("nodes", 1))
            nodes |= self._all_but(prepared.node_file, nodes, wanted, prepared.label)
        # Sorted, as jobs with equal texts of it go out together (`send`).
        return dict(sorted(with_excluded(parameters, nodes).items()))

    def _all_but(self, file: Path, avoided: set[str], wanted: int, label: str) -> set[str]:
        """The nodes that the file does not name: sbatch knows no "some of these and no other"."""
        named = set(slurm.expand(",".join(nodes_of_file(file, "node_file"))))
        only = named - set(slurm.expand(",".join(avoided)))
        if len(only) >= wanted:
            return set(slurm.all_nodes()) - only
        if only:
            self._logger.warning(
                f"{label}: {wanted} node(s) are requested, but only {len(only)} of those allowed"
                " are left: it may run on others"
            )
        return set()

    def _guess_account(self, refusal: str, parameters: Parameters) -> bool:
        """Whether a job that names no account may go out once more, with a guessed one."""
        if "account" in parameters or self._guessed is not None or not wants_account(refusal):
            return False
        self._guessed = guess() or ""
        if self._guessed:
            self._logger.warning(
                f"Slurm requires an account and none is given: trying {self._guessed!r};"
                " name it in the resource slurm_account"
            )
        return bool(self._guessed)

    def _send_group(self, jobs: Sequence[Prepared], parameters: Parameters) -> None:
        """Submit in as few arrays as the cluster allows; our own errors must not make it hang."""
        waiting = list(jobs)
        try:
            while waiting:
                chunk = waiting[: self._array_size(len(waiting))]
                if self._guessed:
                    parameters = {"account": self._guessed, **parameters}
                if self._submit(chunk, parameters):
                    del waiting[: len(chunk)]
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001  # Snakemake must hear of them, whatever it is
            for prepared in waiting:
                self._report.refused(prepared.job, _words(error))

    def _array_size(self, wanted: int) -> int:
        if not self._largest and wanted > _USUAL_ARRAY:
            self._largest = self._ask_largest()
        return min(wanted, self._largest or _USUAL_ARRAY, self._room or wanted)

    def _ask_largest(self) -> int:
        return self._patiently(slurm.largest_array)

    def _patiently(
        self, attempt: Callable[[], _T], clean_up: Callable[[], None] = lambda: None
    ) -> _T:
        return with_patience(
            attempt,
            patience=self._settings.patience,
            on_retry=self._say_retry,
            clean_up=clean_up,
            passes=self._passes,
            sleep=self._pause,
        )

    def _passes(self, words: str) -> bool:
        """Whether it is this run's own jobs that fill the queue: they end."""
        return is_queue_full(words) and self._report.living() > 0

    def _pause(self, seconds: float) -> None:
        """Less than `seconds` where the queue is full and a job of ours ends."""
        living = self._report.living()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.sleep(min(left, 1.0) if self._is_full else left)
            if self._is_full and self._report.living() < living:
                return

    def _submit(self, jobs: Sequence[Prepared], parameters: Parameters) -> bool:
        """One sbatch; False when it must be tried again: smaller, or with an account."""
        tries: list[Batch] = []
        try:
            submitted = self._patiently(
                lambda: self._try(tries, jobs, parameters),
                clean_up=lambda: None if self._is_full else _take_back(tries[-1]),
            )
        except GaveUpError as error:
            return self._is_given_up(jobs, parameters, error)
        try:
            entries = self._note(jobs, tries[-1], submitted)
        except OSError:  # what no later run would find must not run
            self._patiently(lambda: _take_back(tries[-1]))
            raise
        for prepared, entry in zip(jobs, entries, strict=True):
            self._logger.info(f"Slurm job {entry.job_id}: {entry.label}, log {entry.log}")
            self._report.submitted(prepared.job, entry, taken_over=False)
        return True

    def _try(
        self, tries: list[Batch], jobs: Sequence[Prepared], parameters: Parameters
    ) -> Submitted:
        """Each try has a name and files of its own, and is noted in `tries`.

        An earlier one that came through unheard, even late, finds no files, so that it runs
        nothing.

        Raises:
            SlurmError: sbatch failed or did not answer.
            GaveUpError: the same array will be refused again.
        """
        tries.append(self._batch(jobs, parameters))
        self._journal.batch(tries[-1].name, tries[-1].cluster)
        self._is_full = False
        try:
            submitted = submit(tries[-1])
        except slurm.SlurmError as error:
            self._is_full = is_queue_full(str(error))
            if self._is_full or is_array_too_large(str(error)):
                self._journal.refused(tries[-1].name)
                if len(jobs) > 1:
                    raise GaveUpError(str(error), lasting=True) from error
            raise
        if self._room is not None:
            self._room = 2 * len(jobs)
        return submitted

    def _is_given_up(
        self, jobs: Sequence[Prepared], parameters: Parameters, error: GaveUpError
    ) -> bool:
        """Whether the jobs were reported as refused; else they may be tried in another way."""
        if len(jobs) > 1 and is_queue_full(str(error)):
            self._room = len(jobs) // 2
            return False
        if len(jobs) > 1 and is_array_too_large(str(error)):
            allowed = self._ask_largest()
            # SchedulerParameters may allow fewer than MaxArraySize does.
            self._largest = allowed if allowed < len(jobs) else len(jobs) // 2
            return False
        if self._guess_account(str(error), parameters):
            return False
        words = "sbatch did not accept it" if error.lasting else "no answer to sbatch"
        if is_queue_full(str(error)):
            words = f"the queue stayed full for {self._settings.patience} s"
        for prepared in jobs:
            self._report.refused(prepared.job, f"{words}: {error}")
        return True

    def _note(self, jobs: Sequence[Prepared], batch: Batch, submitted: Submitted) -> list[Entry]:
        entries = [
            Entry(
                identity=prepared.identity,
                label=prepared.label,
                job_id=job_id,
                name=batch.name,
                cluster=submitted.cluster,
                token=token,
                run=self._journal.run,
                log=str(self._logs / prepared.log_folder / _log_name(job_id, submitted.cluster)),
            )
            for prepared, job_id, token in zip(jobs, submitted.job_ids, batch.tokens, strict=True)
        ]
        self._journal.jobs(entries)
        return entries

    def _batch(self, jobs: Sequence[Prepared], parameters: Parameters) -> Batch:
        # Counted before sbatch runs: one that was interrupted may have come through.
        self._batches += 1
        ending = name_ending(self._journal.run, self._batches)
        names = [str(prepared.job.name) for prepared in jobs]
        batch = Batch(
            number=self._batches,
            name=job_name(names, prefix=self._settings.jobname_prefix, ending=ending),
            comment=job_comment([prepared.label for prepared in jobs]),
            parameters=parameters,
            commands=[prepared.command for prepared in jobs],
            folder=self._journal.folder,
            requeue_limit=self._settings.requeue_limit if jobs[0].checkpoints else 0,
        )
        # Of several Slurm picks one; until it has said which, each may have the jobs.
        self.clusters.update(batch.cluster.split(","))
        return batch

    def _say_retry(self, words: str, seconds: float) -> None:
        if self._passes(words):
            self._say_full(words)
            return
        self._logger.warning(f"Slurm: {words}; trying again in {seconds:g} s")

    def _say_full(self, words: str) -> None:
        """Once: the queue may stay full for hours."""
        if not self._has_said_full:
            self._has_said_full = True
            self._logger.info(
                f"the queue takes no more jobs ({' '.join(words.split())});"
                f" {self._report.living()} of this run are in it: waiting until they end"
            )

    # --- jobs of an earlier run

    def _take_over(self, prepared: Prepared) -> bool:
        """Watch an earlier run's job instead of submitting; False when there is none to take."""
        same, others = self._candidates.take(prepared.identity)
        for candidate in others:
            self._drop(candidate)
        if same is None:
            return False
        what = "still runs" if same.live else "has succeeded"
        self._logger.info(
            f"took over Slurm job {same.entry.job_id} of an earlier run: it {what}:"
            f" {same.entry.label}, log {same.entry.log}"
        )
        self._report.submitted(prepared.job, same.entry, taken_over=True)
        return True

    def _drop(self, candidate: reattach.Candidate) -> None:
        """End an outdated job first: two of them would write the same files."""
        entry = candidate.entry
        if candidate.live:
            self._logger.info(
                f"cancelling Slurm job {entry.job_id} of an earlier run: {entry.label} is now"
                " made differently (code, params, inputs, software or config)"
            )
            gone = self._patiently(
                lambda: reattach.cancel_and_wait(
                    entry, seconds=_CANCEL_PATIENCE, sleep=self.sleep, clock=time.monotonic
                )
            )
            if not gone:
                self._candidates.add(candidate)
                raise GaveUpError(
                    f"outdated Slurm job {entry.job_id} does not end; next: scancel {entry.job_id}",
                    lasting=True,
                )
        self._journal.end(entry, "outdated")

    def forget_unused(self) -> None:
        """Close the book on jobs that nobody asked for: their outputs were found complete."""
        for candidate in self._candidates:
            if not candidate.live:
                self._journal.end(candidate.entry, "not asked for")


def _take_back(batch: Batch) -> None:
    reattach.cancel_named([batch.name], batch.cluster)


def _log_name(job_id: str, cluster: str) -> str:
    return f"{job_id}.{cluster}.log" if cluster else f"{job_id}.log"


def _words(error: Exception) -> str:
    """Our own errors explain themselves; of any other the kind is said too."""
    if isinstance(error, GaveUpError | ResourceError):
        return str(error)
    return f"could not be submitted: {type(error).__name__}: {error}"
