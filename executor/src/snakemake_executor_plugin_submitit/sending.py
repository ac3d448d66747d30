"""What the outbox does with ready jobs: take over an earlier run's, submit the others."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from snakemake_executor_plugin_submitit import reattach, slurm
from snakemake_executor_plugin_submitit.exclusion import (
    NodeHistory,
    nodes_of_file,
    with_excluded,
)
from snakemake_executor_plugin_submitit.journal import Entry, Journal, name_ends
from snakemake_executor_plugin_submitit.outbox import StoppedError
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience
from snakemake_executor_plugin_submitit.resources import Parameters, ResourceError
from snakemake_executor_plugin_submitit.settings import ExecutorSettings
from snakemake_executor_plugin_submitit.submit import Batch, is_array_too_large, job_name, submit
from snakemake_executor_plugin_submitit.work import Prepared

_T = TypeVar("_T")

# Slurm's default MaxArraySize allows so many; the cluster is asked only when there are more.
_USUAL_ARRAY = 1000
_CANCEL_PATIENCE = 60.0


class Report(Protocol):
    """Where a job's fate goes."""

    def submitted(self, job: Any, entry: Entry, *, taken_over: bool) -> None: ...
    def refused(self, job: Any, words: str) -> None: ...


class Sender:
    """Runs in the outbox's thread, all but `keep` and `forget_unused`."""

    def __init__(
        self,
        journal: Journal,
        settings: ExecutorSettings,
        candidates: dict[str, reattach.Candidate],
        nodes: NodeHistory,
        *,
        report: Report,
        logger: Any,
    ) -> None:
        self.sleep: Callable[[float], None] = time.sleep
        self._journal = journal
        self._settings = settings
        self._candidates = candidates
        self._nodes = nodes
        self._report = report
        self._logger = logger
        self._batches = 0
        self._largest = settings.array_size

    @property
    def has_submitted(self) -> bool:
        """Whether there may be a job of this run."""
        return self._batches > 0

    def send(self, jobs: Sequence[Prepared]) -> None:
        """Every job ends up reported, unless the run is being cancelled.

        Raises:
            StoppedError: it is.
        """
        groups: dict[str, list[Prepared]] = defaultdict(list)
        for prepared in jobs:
            try:
                if not self._take_over(prepared):
                    parameters = self._parameters(prepared)
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
        if prepared.exclude_file is not None:
            nodes.update(nodes_of_file(prepared.exclude_file))
        return dict(sorted(with_excluded(prepared.parameters, nodes).items()))

    def _send_group(self, jobs: Sequence[Prepared], parameters: Parameters) -> None:
        """In as few arrays as the cluster allows; an error of ours is no reason to hang."""
        waiting = list(jobs)
        try:
            while waiting:
                chunk = waiting[: self._array_size(len(waiting))]
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
        return min(wanted, self._largest or _USUAL_ARRAY)

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
            sleep=self.sleep,
        )

    def _submit(self, jobs: Sequence[Prepared], parameters: Parameters) -> bool:
        """One sbatch; False when the array was too large and smaller ones must be tried."""
        batch = self._batch(jobs, parameters)
        self._journal.batch(batch.tag)
        take_back = partial(_take_back, batch.tag)
        try:
            job_ids = self._patiently(
                lambda: submit(batch, self._journal.folder),
                # sbatch may have come through unheard: without its job files it runs nothing.
                clean_up=take_back,
            )
        except GaveUpError as error:
            if is_array_too_large(str(error)) and len(jobs) > 1:
                allowed = self._ask_largest()
                # SchedulerParameters may allow fewer than MaxArraySize does.
                self._largest = allowed if allowed < len(jobs) else len(jobs) // 2
                return False
            words = "sbatch did not accept it" if error.lasting else "no answer to sbatch"
            for prepared in jobs:
                self._report.refused(prepared.job, f"{words}: {error}")
            return True
        try:
            entries = self._note(jobs, batch, job_ids)
        except OSError:  # what no later run would find must not run
            self._patiently(take_back)
            raise
        main = job_ids[0].partition("_")[0]
        self._logger.info(f"Slurm job {main} has {len(jobs)} job(s): {batch.name}")
        for prepared, entry in zip(jobs, entries, strict=True):
            self._report.submitted(prepared.job, entry, taken_over=False)
        return True

    def _note(self, jobs: Sequence[Prepared], batch: Batch, job_ids: Sequence[str]) -> list[Entry]:
        now = time.time()
        entries = [
            Entry(p.key, p.fingerprint, job_id, path.stem, batch.tag, self._journal.run, now)
            for p, job_id, (_, path) in zip(jobs, job_ids, batch.work, strict=True)
        ]
        self._journal.jobs(entries)
        return entries

    def _batch(self, jobs: Sequence[Prepared], parameters: Parameters) -> Batch:
        self._batches += 1
        results = self._journal.folder / "results"
        return Batch(
            name=job_name([p.job.name for p in jobs], name_ends(self._journal.run)),
            tag=f"{self._journal.run}.{self._batches}",
            parameters=parameters,
            work=[
                (prepared.command, results / f"{self._batches}-{index}.json")
                for index, prepared in enumerate(jobs)
            ],
            requeue_limit=self._settings.requeue_limit if jobs[0].checkpoints else 0,
        )

    def _say_retry(self, words: str, seconds: float) -> None:
        self._logger.warning(f"Slurm: {words}; trying again in {seconds:g} s")

    # --- jobs of an earlier run

    def _take_over(self, prepared: Prepared) -> bool:
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
        self._logger.info(f"took over Slurm job {entry.job_id} of an earlier run: it {what}")
        self._report.submitted(prepared.job, entry, taken_over=True)
        return True

    def _drop(self, candidate: reattach.Candidate) -> None:
        """End an outdated job first: two of them would write the same files."""
        entry = candidate.entry
        if candidate.live:
            self._logger.info(f"cancelling outdated Slurm job {entry.job_id} of an earlier run")
            gone = self._patiently(
                lambda: reattach.cancel_and_wait(
                    entry, seconds=_CANCEL_PATIENCE, sleep=self.sleep, clock=time.monotonic
                )
            )
            if not gone:
                raise GaveUpError(
                    f"outdated Slurm job {entry.job_id} does not end; next: scancel {entry.job_id}",
                    lasting=True,
                )
        self._journal.end(entry, "outdated")

    def keep(self, entry: Entry) -> None:
        """Offer a job that was given up, but may still run, to a retry of the same job."""
        self._candidates[entry.key] = reattach.Candidate(entry, live=True)

    def forget_unused(self) -> None:
        """Close the book on jobs that nobody asked for: their outputs were found complete."""
        for candidate in self._candidates.values():
            if not candidate.live:
                self._journal.end(candidate.entry, "not asked for")


def _take_back(tag: str) -> None:
    """Cancel what was submitted under this tag, if anything was."""
    slurm.cancel(sorted(slurm.tagged([tag])))


def _words(error: Exception) -> str:
    """Our own errors explain themselves; of any other the kind is said too."""
    if isinstance(error, GaveUpError | ResourceError):
        return str(error)
    return f"could not be submitted: {type(error).__name__}: {error}"
