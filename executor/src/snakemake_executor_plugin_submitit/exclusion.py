"""Nodes that later jobs avoid: those lost under this run's jobs, and those named in a file."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.polling import JobStates
from snakemake_executor_plugin_submitit.resources import Parameters, ResourceError, node_names
from snakemake_executor_plugin_submitit.slurm import JobState, NoAccountingError, SlurmError
from snakemake_executor_plugin_submitit.status import INTERRUPTED

_FILE_LIMIT = 1 << 20


class NodeHistory:
    """Where jobs ran when Slurm was last asked, so that an interruption has a suspect."""

    def __init__(self) -> None:
        self._ran_on: dict[str, str] = {}
        self._requeued: set[str] = set()
        self.unexplained: set[str] = set()

    def suspects(self, states: Mapping[str, JobState]) -> dict[str, str]:
        """Jobs that were interrupted since the last call, and where they ran, empty if not seen.

        A job that has left its nodes without having ended was interrupted: by a lost node, or
        by a preemption; so was one that waits for its time, which only a requeue sets.
        """
        found = {}
        for job_id, job in states.items():
            if job.state == "COMPLETING":  # leaves its nodes one by one; what follows tells why
                continue
            before = self._ran_on.pop(job_id, "")
            moved = not job.has_ended and job.nodes != before
            requeued = job.waits and job.reason == "BeginTime" and job_id not in self._requeued
            if requeued or (before and (moved or job.state in INTERRUPTED)):
                found[job_id] = before
            if job.waits and job.reason == "BeginTime":
                self._requeued.add(job_id)
            else:
                self._requeued.discard(job_id)
            if not job.has_ended and not job.waits and job.nodes:
                self._ran_on[job_id] = job.nodes
        return found

    def explain(self, attempts: Mapping[str, JobState]) -> set[str]:
        """Record how interrupted attempts ended; returns the nodes whose failure ended one.

        A job on several nodes blames none: its record does not say which of them failed.
        """
        explained = self.unexplained & attempts.keys()
        self.unexplained -= explained
        failed = (attempts[job_id] for job_id in explained)
        return {
            attempt.nodes
            for attempt in failed
            if attempt.state == "NODE_FAIL" and attempt.nodes and not set("[,") & set(attempt.nodes)
        }


class NodeGuard:
    """Keeps this run's jobs off nodes that were lost under some of them.

    Args:
        say: gets warnings.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._history = NodeHistory()
        self.lost: set[str] = set()

    def look(self, answer: JobStates, *, has_accounting: bool) -> None:
        """Process Slurm's states of all jobs. Nodes of other clusters are ignored."""
        known = {e.job_id: job for e, job in answer.items() if job is not None and not e.cluster}
        suspects = self._history.suspects(known)
        if not suspects and not self._history.unexplained:
            return
        names = {entry.name for entry in answer}
        waiting = [job_id for job_id, job in known.items() if job.waits]
        try:
            lost = self._lost_under(suspects, names if has_accounting else ())
            if lost:
                self._exclude(lost, waiting)
        except NoAccountingError:
            self._history.unexplained.clear()
        except SlurmError as error:
            jobs = ", ".join(sorted(suspects))
            self._say(f"cannot find out what interrupted {jobs}: {error}")

    def _lost_under(self, suspects: Mapping[str, str], names: Collection[str]) -> set[str]:
        """Nodes, not known as lost yet, that interrupted a job; `names`: whose records to read."""
        ran_on = {job_id: set(slurm.expand(nodes)) for job_id, nodes in suspects.items()}
        lost = slurm.lost_nodes(set().union(*ran_on.values()))
        unexplained = {job_id for job_id, nodes in ran_on.items() if not nodes & lost}
        self._history.unexplained |= unexplained
        if self._history.unexplained and names:
            # A node may be back already: the database knows what ended the attempt.
            lost |= self._history.explain(slurm.last_attempts(self._history.unexplained, names))
        return lost - self.lost

    def _exclude(self, lost: set[str], waiting: Sequence[str]) -> None:
        every = slurm.all_nodes()
        if 2 * len(self.lost | lost) > len(every):
            # A fault of the site rather than of single nodes: without all of them nothing would
            # run.
            self._say(
                f"lost {', '.join(sorted(lost))}: not excluded, as most of the cluster's"
                f" {len(every)} node(s) would be"
            )
            return
        self.lost |= lost
        self._say(f"lost {', '.join(sorted(lost))}: excluded for the rest of this run")
        slurm.exclude_from(waiting, ",".join(sorted(self.lost)))


def with_excluded(parameters: Parameters, nodes: Iterable[str]) -> Parameters:
    """`parameters` with `nodes` joined to its `exclude`."""
    given = node_names(parameters.get("exclude", ""), "resource exclude")
    names = list(dict.fromkeys([*given, *sorted(nodes)]))
    return {**parameters, "exclude": ",".join(names)} if names else parameters


def nodes_of_file(path: Path, resource: str = "exclude_file") -> list[str]:
    """Node names, one per line; `#` begins a comment; empty if there is no such file.

    Raises:
        ResourceError: it cannot be read, or contains anything but names.
    """
    where = f"resource {resource}={str(path)!r}"
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_FILE_LIMIT + 1)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"{where}: {error}") from error
    if len(text) > _FILE_LIMIT:
        raise ResourceError(f"{where}: more than {_FILE_LIMIT} characters")
    names = [line.partition("#")[0].strip() for line in text.splitlines()]
    return node_names(",".join(names), where)
