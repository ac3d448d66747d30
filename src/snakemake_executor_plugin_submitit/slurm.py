"""The three questions to Slurm: what my jobs do, which jobs a tag has, and to cancel jobs."""

import getpass
import os
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_TIMEOUT = 60.0
# squeue's columns: id with array index, state, reason, nodes, comment.
_FORMAT = "%i|%T|%r|%N|%k"
_COLUMNS = 5
# Arguments of one scancel call: far below the kernel's limit.
_CANCEL_AT_ONCE = 500
# Inside a job of another allocation these point at Slurm itself, not at that job.
_KEPT = ("SLURM_CONF", "SLURM_TIME_FORMAT")


@dataclass(frozen=True)
class JobState:
    """What squeue says about one job or array task."""

    state: str
    reason: str = ""
    nodes: str = ""
    comment: str = ""


class SlurmError(RuntimeError):
    """A Slurm command failed or did not answer; the message has its own words."""


def states(job_ids: Collection[str]) -> dict[str, JobState]:
    """One squeue call about these jobs and array tasks; what Slurm has forgotten is left out.

    Raises:
        SlurmError: the controller does not answer.
    """
    main_ids = sorted({job_id.partition("_")[0] for job_id in job_ids})
    if not main_ids:
        return {}
    try:
        return _squeue("--jobs", ",".join(main_ids))
    except SlurmError as error:
        if "Invalid job id" in str(error):  # a single id that Slurm has forgotten
            return {}
        raise


def tagged(tag: str) -> dict[str, JobState]:
    """This user's unfinished jobs whose comment is `tag` or begins with `tag.`.

    Raises:
        SlurmError: the controller does not answer.
    """
    mine = _squeue(states="PENDING,RUNNING,SUSPENDED,CONFIGURING")
    return {
        job_id: job
        for job_id, job in mine.items()
        if job.comment == tag or job.comment.startswith(f"{tag}.")
    }


def _squeue(*selection: str, states: str = "all") -> dict[str, JobState]:
    # --user makes the controller send this user's jobs alone.
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser()]
    command += ["--states", states, "--format", _FORMAT, *selection]
    return parse_squeue(_run(command))


def parse_squeue(text: str) -> dict[str, JobState]:
    """Lines of `_FORMAT` by job id; a line of another form is not about a job."""
    rows = (line.split("|", _COLUMNS - 1) for line in text.splitlines())
    return {row[0]: JobState(*row[1:]) for row in rows if len(row) == _COLUMNS}


def cancel(job_ids: Sequence[str]) -> None:
    """scancel; jobs that have ended meanwhile are no error.

    Raises:
        SlurmError: the controller does not answer.
    """
    for first in range(0, len(job_ids), _CANCEL_AT_ONCE):
        _run(["scancel", "--quiet", *job_ids[first : first + _CANCEL_AT_ONCE]])


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not installed or not on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} does not answer after {_TIMEOUT:g} s") from error
    if done.returncode:
        raise SlurmError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@contextmanager
def outside_of_any_job() -> Iterator[None]:
    """Hide this process's own allocation: sbatch would hand its variables to the new jobs."""
    hidden = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("SLURM_") and name not in _KEPT
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
