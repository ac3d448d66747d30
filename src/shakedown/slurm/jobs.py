"""Jobs in Slurm's queue: their states, and which of them are ours."""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from shakedown.core.errors import LaunchError
from shakedown.slurm.client import SECONDS, run

# squeue's columns: id with array index, state, reason, nodes, start, owner's number, name, comment.
# The comment is last, as only it may contain the separator.
_FORMAT = "%i|%T|%r|%N|%S|%U|%j|%k"
_COLUMNS = 8
JOB_ID = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,7})?")  # of a job, or of a task of an array
CLUSTER = re.compile(r"[\w.-]{0,64}")
_MARK = re.compile(r"[0-9a-f]{16}")
_FORGOTTEN = "Invalid job id"  # Slurm knows a job for MinJobAge (300 s by default) after its end
# squeue(1), JOB STATE CODES. Waiting jobs, including held and requeued ones, run nowhere now.
_WAITS = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
    | {"RESV_DEL_HOLD"}
)
_ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
    | {"DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"}
)


@dataclass(frozen=True)
class Job:
    """A job or a task of an array, with squeue's values; empty where Slurm has none.

    `nodes`: their short form; `start`: the actual or expected start, in seconds since 1970;
    `owner`: the user's number.
    """

    state: str
    reason: str = ""
    nodes: str = ""
    start: float | None = None
    owner: str = ""
    name: str = ""
    comment: str = ""

    @property
    def waits(self) -> bool:
        """Whether none of it runs now."""
        return self.state in _WAITS

    @property
    def ended(self) -> bool:
        """Whether it will not run any more; an empty state means that Slurm has forgotten the
        job."""
        return not self.state or self.state in _ENDED

    @property
    def runs(self) -> bool:
        """Whether it has processes, as far as known; an unknown state counts as alive."""
        return not (self.waits or self.ended)

    @property
    def takes_steps(self) -> bool:
        """Whether srun can start steps in it now."""
        return self.state == "RUNNING"

    def bears(self, mark: str) -> bool:
        """Whether it is this user's job with this mark.

        Either is enough: --sbatch-args may give the job another name or comment.
        """
        return self.owner == str(os.getuid()) and is_marked(mark, self.name, self.comment)


def is_marked(mark: str, name: str, comment: str) -> bool:
    """Whether a job with this name and comment has the mark; False if it is not a valid mark."""
    is_mark = _MARK.fullmatch(mark) is not None
    return is_mark and (comment == marked_comment(mark) or name.endswith(f"-{mark}"))


def marked_comment(mark: str) -> str:
    """The comment to submit a job with this mark with."""
    return f"shakedown-{mark}"


def ask(job_ids: Collection[str], *, cluster: str = "", seconds: float = SECONDS) -> dict[str, Job]:
    """Query these jobs with one squeue; those that it has forgotten are left out.

    Args:
        cluster: one of several that share a database; empty: this host's own.
        seconds: after which an unresponsive squeue is ended.

    Raises:
        LaunchError: Slurm could not be asked, with the reason.
        ValueError: an invalid id or cluster: to squeue it could mean many jobs.
    """
    for job_id in job_ids:
        if JOB_ID.fullmatch(job_id) is None:
            raise ValueError(f"{job_id!r} is not the id of one Slurm job")
    if CLUSTER.fullmatch(cluster) is None:
        raise ValueError(f"{cluster!r} is not a cluster name")
    if not job_ids:
        return {}
    # For an array all tasks: squeue refuses `7_1` once the task is no longer in the queue.
    whole = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
    # Without --states=all squeue hides jobs that have ended.
    command = ["squeue", "--noheader", "--array", "--all", "--states=all"]
    command += [f"--format={_FORMAT}"]
    command += [f"--clusters={cluster}"] if cluster else []
    answer = run([*command, f"--jobs={whole}"], seconds=seconds)
    if _FORGOTTEN in answer.said:  # a single one
        return {}
    if answer.said:
        raise LaunchError(f"squeue: {answer.said}")
    return {job_id: job for job_id, job in parse(answer.text).items() if job_id in job_ids}


def parse(text: str) -> dict[str, Job]:
    """squeue's lines by job id; a line of another form is not about a job."""
    found = {}
    for line in text.splitlines():
        row = [_word(cell) for cell in line.split("|", _COLUMNS - 1)]
        if len(row) == _COLUMNS:
            found[row[0]] = Job(row[1], row[2], row[3], _moment(row[4]), *row[5:])
    return found


def submit(script: str, options: Sequence[str], *, name: str, mark: str) -> str:
    """Submit a batch script as a job that bears the mark, and return its id.

    Raises:
        LaunchError: Slurm refused, with its own words.
    """
    marks = [f"--job-name={name}-{mark}", f"--comment={marked_comment(mark)}"]
    answer = run(["sbatch", "--parsable", *marks, *options], stdin=script)
    # `12`, or `12;cluster` where there are several clusters.
    job_id = answer.text.strip().partition(";")[0]
    if answer.words or JOB_ID.fullmatch(job_id) is None:
        raise LaunchError(
            f"sbatch refused the job {name}: {(answer.words or answer.text).strip()[:400]}",
            hint="sinfo -o '%P %a %G %l %D'",
        )
    return job_id


def cancel_marked(job_id: str, mark: str) -> None:
    """Cancel this job and no other: Slurm is asked before whether it bears the mark.

    Raises:
        LaunchError: Slurm could not be asked, or the number is another job's.
    """
    found = ask([job_id]).get(job_id, Job(""))
    if found.ended:
        return
    if not found.bears(mark):
        raise LaunchError(
            f"job {job_id} was not cancelled: it has not the mark of the one that was submitted",
            hint=f"squeue -j {job_id}",
        )
    cancel(job_id)


def cancel(job_id: str) -> None:
    """Cancel a job; nothing more is needed for one that Slurm has forgotten.

    Raises:
        LaunchError: Slurm could not be asked, or refused.
    """
    said = run(["scancel", job_id]).said
    if said and _FORGOTTEN not in said:
        raise LaunchError(f"scancel {job_id}: {said[:300]}", hint=f"squeue -j {job_id}")


def _word(cell: str) -> str:
    return "" if cell in ("(null)", "N/A", "None") else cell


def _moment(text: str) -> float | None:
    """squeue writes the local time of its host, without a zone."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
