"""Jobs of an earlier, killed snakemake that this run may take over."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.identity import JobIdentity
from snakemake_executor_plugin_submitit.journal import Entry, JobJournal, OldRun, open_runs
from snakemake_executor_plugin_submitit.node import read_result
from snakemake_executor_plugin_submitit.polling import ask
from snakemake_executor_plugin_submitit.status import judge


@dataclass(frozen=True)
class Candidate:
    """A job that still runs (`live`), or that succeeded while nobody watched."""

    entry: Entry
    live: bool


class Candidates:
    """The jobs waiting to be taken over, by their outputs."""

    def __init__(self, found: Iterable[Candidate] = ()) -> None:
        self._open: dict[Entry, Candidate] = {}
        self._makers: dict[str, list[Entry]] = defaultdict(list)
        for candidate in found:
            self.add(candidate)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._open.values())

    def add(self, candidate: Candidate) -> None:
        """Offer a job."""
        self._open[candidate.entry] = candidate
        for path in candidate.entry.identity.makes:
            self._makers[path].append(candidate.entry)

    def take(self, identity: JobIdentity) -> tuple[Candidate | None, list[Candidate]]:
        """The candidate that is this very job, and those that conflict with it.

        The latter make an output of it, or made it otherwise: they must have ended before it is
        submitted.
        """
        makers = [entry for path in identity.makes for entry in self._makers.pop(path, [])]
        touched = [self._open.pop(entry) for entry in dict.fromkeys(makers) if entry in self._open]
        touched.reverse()  # the newest first
        same = [candidate for candidate in touched if candidate.entry.identity == identity]
        return (same[0] if same else None), [c for c in touched if c not in same[:1]]


def find(journal: JobJournal) -> list[Candidate]:
    """Candidates, oldest first. Ends what is lost, and cancels batches that nobody can follow.

    Raises:
        SlurmError: the controller does not answer; without it a job might run twice.
        JournalError: a journal of another form.
    """
    candidates: list[Candidate] = []
    for run in open_runs(journal.base, journal.place):
        for cluster in set(run.lost.values()):
            cancel_named([name for name, at in run.lost.items() if at == cluster], cluster)
        journal.adopt(run.jobs.values())
        found = _of_run(run, journal)
        candidates += found
        if not found:
            journal.close_run(run.name)
    return candidates


def cancel_named(names: Collection[str], cluster: str) -> None:
    """Cancel whatever was submitted under these names, if anything was.

    Raises:
        SlurmError: the controller does not answer.
    """
    jobs = slurm.unfinished(cluster)
    ids = [job_id for job_id, job in jobs.items() if job.name in names]
    slurm.cancel(sorted({job_id.partition("_")[0] for job_id in ids}), cluster=cluster)


def _of_run(run: OldRun, journal: JobJournal) -> list[Candidate]:
    # Asked before the results are read: a job that ends in between then counts as running. The
    # other way round it would seem to have ended without a result.
    states = ask(run.jobs.values())
    found = []
    for entry in run.jobs.values():
        judgement = judge(read_result(entry.result_file(journal.base)), states.get(entry))
        if judgement.outcome == "succeeded":
            found.append(Candidate(entry, live=False))
        elif judgement.outcome == "running" or judgement.patience == "requeue":
            found.append(Candidate(entry, live=True))
        else:
            # Should it run in spite of what is known of it, its successor must not run beside it.
            if entry in states:
                slurm.cancel([entry.job_id], cluster=entry.cluster)
            journal.end(entry, "lost")
    return found


def cancel_and_wait(
    entry: Entry,
    *,
    seconds: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> bool:
    """Cancel a job and wait until Slurm has ended it; False when that takes too long."""
    if _is_live(entry):
        slurm.cancel([entry.job_id], cluster=entry.cluster)
    deadline = clock() + seconds
    while _is_live(entry):
        if clock() > deadline:
            return False
        sleep(1.0)
    return True


def _is_live(entry: Entry) -> bool:
    state = ask([entry]).get(entry)
    return state is not None and judge(None, state).outcome == "running"
