"""The polling of Slurm about jobs, and the meaning of its answers or silence."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.journal import Entry
from snakemake_executor_plugin_submitit.slurm import JobState, NoAccountingError, SlurmError

# Slurm's state by job; None if it does not know such a job of ours.
JobStates = dict[Entry, JobState | None]

# Asked again this soon when a failure on file waits for Slurm's word.
_SOON = 2.0
_LONGEST_DELAY = 60.0
# While results keep coming, as files, Slurm is asked so much less often.
_BUSY_FACTOR = 3.0


class Poller:
    """A poller with at most one squeue per poll, and one sacct for jobs that squeue has forgotten.

    Args:
        seconds: between two polls.
        patience: seconds of silence after which `is_given_up`.
        say: told once when Slurm falls silent, and once when it answers again.
        run: the run whose jobs this process has submitted itself: their ids are enough.
        note_name: told when Slurm shows such a job under another name than it was given.
    """

    def __init__(
        self,
        seconds: float,
        patience: float,
        say: Callable[[str], None],
        *,
        run: str = "",
        note_name: Callable[[Entry, str], None] = lambda _entry, _name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._patience = patience
        self._say = say
        self._run = run
        self._note_name = note_name
        self._names: dict[str, str] = {}
        self._clock = clock
        self._asked = self._progress = clock()
        self._silent_since: float | None = None
        self._database_silent_since: float | None = None
        self._delay = seconds
        self.has_accounting = True

    def note_progress(self) -> None:
        """A job was submitted or has ended: there is less reason to ask."""
        self._progress = self._clock()

    def is_due(self, *, soon: bool) -> bool:
        """`soon`: a job's failure on file waits for Slurm's word."""
        now = self._clock()
        since = now - self._asked
        if self._silent_since is not None:
            return since >= self._delay
        if soon:
            return since >= min(_SOON, self._seconds)
        quiet = min(since, now - self._progress)
        return quiet >= self._seconds or since >= _BUSY_FACTOR * self._seconds

    @property
    def is_given_up(self) -> bool:
        """Whether Slurm has been silent for longer than the patience."""
        since = self._silent_since
        return since is not None and self._clock() - since > self._patience

    def ask(self, entries: Collection[Entry]) -> JobStates | None:
        """Slurm's word about `entries`; None when it does not answer."""
        try:
            known = ask(entries, self._is_ours)
        except SlurmError as error:
            self._note_silence(error)
            return None
        finally:
            self._asked = self._clock()
        if self._silent_since is not None:
            self._say("Slurm answers again")
            self._silent_since = None
        forgotten = [entry for entry in entries if entry not in known]
        return {**dict.fromkeys(forgotten), **known, **self._look_up(forgotten)}

    def cancel(self, entries: Iterable[Entry]) -> None:
        """Cancel jobs: own ones by their ids, those of earlier runs where Slurm has them so named.

        Raises:
            SlurmError: a controller does not answer.
        """
        own = [entry for entry in entries if entry.run == self._run]
        earlier = [entry for entry in entries if entry.run != self._run]
        for cluster, members in by_cluster([*own, *ask(earlier)]).items():
            slurm.cancel([entry.job_id for entry in members], cluster=cluster)

    def _is_ours(self, entry: Entry, job: JobState) -> bool:
        if is_named(entry, job):
            return True
        if entry.run != self._run:
            return False
        if self._names.get(entry.name) != job.name:
            self._names[entry.name] = job.name
            self._note_name(entry, job.name)
        return True

    def _note_silence(self, error: SlurmError) -> None:
        if self._silent_since is None:
            self._say(f"no word from Slurm, asking on for {self._patience:g} s: {error}")
            self._silent_since = self._clock()
            self._delay = _SOON
        else:
            self._delay = min(2 * self._delay, _LONGEST_DELAY)

    def _look_up(self, entries: Collection[Entry]) -> dict[Entry, JobState]:
        if not entries or not self.has_accounting:
            return {}
        try:
            found = _accounted(entries, self._names)
        except NoAccountingError:
            self.has_accounting = False
            return {}
        except SlurmError as error:
            return self._without_database(entries, error)
        self._database_silent_since = None
        # Of a job that the controller has lost the database may say for ever that it runs.
        return {entry: job for entry, job in found.items() if job.has_ended}

    def _without_database(
        self, entries: Collection[Entry], error: SlurmError
    ) -> dict[Entry, JobState]:
        """Jobs that only the database knows count as unfinished while there is patience."""
        if self._database_silent_since is None:
            self._say(f"no word from the accounting database: {error}")
            self._database_silent_since = self._clock()
        if self._clock() - self._database_silent_since > self._patience:
            return {}
        waiting = JobState("PENDING", "the accounting database does not answer")
        return dict.fromkeys(entries, waiting)


def is_named(entry: Entry, job: JobState) -> bool:
    """Whether Slurm's job has the entry's name, or the one that Slurm was seen to give it."""
    return job.name == entry.name or (bool(entry.known_as) and job.name == entry.known_as)


def ask(
    entries: Iterable[Entry], is_ours: Callable[[Entry, JobState], bool] = is_named
) -> Mapping[Entry, JobState]:
    """Slurm's word about jobs, by one squeue a cluster; what it has forgotten is left out.

    An id begins anew in a cluster that was set up again: the name tells our job.

    Raises:
        SlurmError: a controller does not answer.
    """
    found = {}
    for cluster, members in by_cluster(entries).items():
        states = slurm.states({entry.job_id for entry in members}, cluster)
        for entry in members:
            state = states.get(entry.job_id)
            if state is not None and is_ours(entry, state):
                found[entry] = state
    return found


def by_cluster(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    """Jobs by the cluster that has to be asked about them."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.cluster].append(entry)
    return groups


def _accounted(entries: Collection[Entry], names: Mapping[str, str]) -> dict[Entry, JobState]:
    found = {}
    for cluster, members in by_cluster(entries).items():
        given = {entry.name for entry in members}
        known = given | {entry.known_as for entry in members} | {names.get(n, n) for n in given}
        jobs = slurm.accounted({entry.job_id for entry in members}, known - {""}, cluster)
        found.update({entry: jobs[entry.job_id] for entry in members if entry.job_id in jobs})
    return found
