"""What Slurm says of given jobs and of their nodes: one short question each, for a status."""

import os
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from shakedown.core.errors import LaunchError

# squeue's columns: id with array index, state, reason, nodes, start, owner's number, name, comment.
# The comment is last: it alone may hold the separator.
_FORMAT = "%i|%T|%r|%N|%S|%U|%j|%k"
_COLUMNS = 8
JOB_ID = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,7})?")  # of a job, or of a task of an array
CLUSTER = re.compile(r"[\w.-]{0,64}")
# Held jobs among them, whose state some versions of Slurm name otherwise.
_WAITS = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
    | {"DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)
_WHICH_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")  # and who asks it
_SILENT = "*"  # behind the state of a node that does not answer (sinfo(1))


@dataclass(frozen=True)
class Job:
    """A job or a task of an array, in squeue's words; empty where Slurm has none.

    `nodes` in their short form; `start`, when it started or is expected to, in seconds since 1970;
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
        return self.state in _WAITS

    @property
    def ended(self) -> bool:
        """It will not run any more; an empty state is that of a job that Slurm has forgotten."""
        return not self.state or self.state in _ENDED


def ask(job_ids: Collection[str], *, cluster: str = "", seconds: float) -> dict[str, Job]:
    """One squeue about these jobs; those that it has forgotten (MinJobAge, 300 s) are left out.

    Args:
        cluster: one of several that share a database; empty: this host's own.
        seconds: after which a squeue without an answer is ended.

    Raises:
        LaunchError: Slurm could not be asked, with the reason.
        ValueError: an id or a cluster that is none: to squeue it could mean many jobs.
    """
    for job_id in job_ids:
        if JOB_ID.fullmatch(job_id) is None:
            raise ValueError(f"{job_id!r} is no id of one Slurm job")
    if CLUSTER.fullmatch(cluster) is None:
        raise ValueError(f"{cluster!r} is no name of a cluster")
    if not job_ids:
        return {}
    # Of an array all tasks: squeue refuses `7_1` once the task is no longer in the queue.
    whole = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
    command = ["squeue", "--noheader", "--array", "--all", "--states=all"]
    command += [f"--format={_FORMAT}"]
    command += [f"--clusters={cluster}"] if cluster else []
    code, out, words = _run([*command, f"--jobs={whole}"], seconds)
    if code and "Invalid job id" in words:  # a single one that Slurm has forgotten
        return {}
    if code:
        raise LaunchError(f"squeue: {words}")
    return {job_id: job for job_id, job in parse(out).items() if job_id in job_ids}


def parse(text: str) -> dict[str, Job]:
    """Lines of squeue by job id; a line of another form is not about a job."""
    found = {}
    for line in text.splitlines():
        row = [_word(cell) for cell in line.split("|", _COLUMNS - 1)]
        if len(row) == _COLUMNS:
            found[row[0]] = Job(row[1], row[2], row[3], _moment(row[4]), *row[5:])
    return found


def node_troubles(nodes: Sequence[str], *, seconds: float) -> list[str]:
    """One sinfo: a sentence for each of `nodes` (short forms too) that is down or drained.

    Raises:
        LaunchError: Slurm could not be asked.
    """
    if not nodes:
        return []
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%T|%E", f"--nodes={','.join(nodes)}"]
    code, out, words = _run(command, seconds)
    if code:
        raise LaunchError(f"sinfo: {words}")
    rows = [row for line in out.splitlines() if len(row := line.split("|", 2)) == 3]
    # A node has a line for each of its partitions.
    return list(dict.fromkeys(_trouble(*row) for row in rows if _is_lost(row[1])))


def _is_lost(state: str) -> bool:
    return state.endswith(_SILENT) or state.startswith(("down", "drain", "fail"))


def _trouble(node: str, state: str, reason: str) -> str:
    silent = ", it does not answer Slurm" if state.endswith(_SILENT) else ""
    why = f": {reason}" if reason not in ("", "none") else ""
    return f"node {node} is {state.rstrip(_SILENT)}{silent}{why}"


def _word(cell: str) -> str:
    return "" if cell in ("(null)", "N/A", "None") else cell


def _moment(text: str) -> float | None:
    """squeue writes the local time of its host, without a zone."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _run(command: Sequence[str], seconds: float) -> tuple[int, str, str]:
    """Exit code, output, and the first line of the errors.

    Raises:
        LaunchError: it is not installed, or did not answer in time.
    """
    # The user's own SQUEUE_FORMAT, SINFO_STATES, SLURM_CLUSTERS ... would change the question;
    # `standard` is ISO 8601 without words such as `Tomorr`.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _WHICH_SLURM or not name.startswith(("SQUEUE_", "SINFO_", "SLURM_"))
    }
    environment["SLURM_TIME_FORMAT"] = "standard"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
            env=environment,
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not installed on this host") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{command[0]} did not answer within {seconds:g} s") from error
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror or error}") from error
    words = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
    return done.returncode, done.stdout, words or f"exit code {done.returncode}"
