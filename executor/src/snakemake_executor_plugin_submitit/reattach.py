"""Jobs of an earlier snakemake that was killed: which of them this run may take over."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.journal import Entry, Journal, OldRun, open_runs
from snakemake_executor_plugin_submitit.node import read_result
from snakemake_executor_plugin_submitit.polling import is_ours
from snakemake_executor_plugin_submitit.status import judge


@dataclass(frozen=True)
class Candidate:
    """A job that still runs (`live`), or that succeeded while nobody watched."""

    entry: Entry
    live: bool


def identity(job: Any) -> tuple[str, str]:
    """A job's key, what it makes, and its fingerprint, how it makes it.

    Code of `script:` and `run:` blocks is not part of the fingerprint.
    """
    members = sorted(job.jobs, key=str) if job.is_group() else [job]
    outputs = sorted(str(path) for member in members for path in member.output)
    names = [f"{member.rule.name} {dict(member.wildcards_dict)}" for member in members]
    how = [[m.rule.name, sorted(map(str, m.input)), str(m.shellcmd)] for m in members]
    digest = hashlib.sha256(json.dumps(how).encode()).hexdigest()[:16]
    return json.dumps(outputs or names), digest


def find(journal: Journal) -> dict[str, Candidate]:
    """Candidates by key. Ends what is lost, and cancels batches that nobody can follow any more.

    Raises:
        SlurmError: the controller does not answer; without it a job might run twice.
        JournalError: a journal of another form.
    """
    candidates: dict[str, Candidate] = {}
    for run in open_runs(journal.base):
        if run.lost_tags:
            slurm.cancel(sorted(slurm.tagged(run.lost_tags)))
        found = _of_run(run, journal)
        candidates.update((candidate.entry.key, candidate) for candidate in found)
        if not found:
            journal.close_run(run.name)
    return candidates


def _of_run(run: OldRun, journal: Journal) -> list[Candidate]:
    states = slurm.states([entry.job_id for entry in run.jobs.values()])
    found = []
    for entry in run.jobs.values():
        # Another cluster's job may have the same id.
        state = states[entry.job_id] if is_ours(states, entry) else None
        judgement = judge(read_result(entry.result_file(journal.base)), state)
        if judgement.outcome == "succeeded":
            found.append(Candidate(entry, live=False))
        elif judgement.outcome == "running" or judgement.patience == "requeue":
            found.append(Candidate(entry, live=True))
        else:
            journal.end(entry, "lost")
    return found


def is_stale(candidate: Candidate, fingerprint: str, inputs: Iterable[str]) -> bool:
    """True when the job would be made otherwise today: another command, or a newer input."""
    if candidate.entry.fingerprint != fingerprint:
        return True
    return not candidate.live and _newest(inputs) > candidate.entry.submitted


def _newest(paths: Iterable[str]) -> float:
    """The newest modification, seconds since 1970; what is not a local file does not count."""
    files = [Path(path) for path in paths]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def cancel_and_wait(
    entry: Entry,
    *,
    seconds: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> bool:
    """Cancel a job and wait until Slurm has ended it; False when that takes too long."""
    slurm.cancel([entry.job_id])
    deadline = clock() + seconds
    while _is_live(slurm.states([entry.job_id]), entry):
        if clock() > deadline:
            return False
        sleep(1.0)
    return True


def _is_live(states: dict[str, slurm.JobState], entry: Entry) -> bool:
    return is_ours(states, entry) and judge(None, states[entry.job_id]).outcome == "running"
