"""The questions to Slurm: what my jobs do, which jobs a tag has, how nodes are; and to cancel."""

import getpass
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_TIMEOUT = 60.0
# squeue's columns: id with array index, state, reason, nodes, comment.
_SQUEUE_FORMAT = "%i|%T|%r|%N|%k"
# The comment is in the database only where the cluster keeps it, the name always.
_SACCT_FORMAT = "JobID,State,ExitCode,NodeList,JobName"
_ATTEMPTS_FORMAT = "JobID,State,End,NodeList,JobName"
_COLUMNS = 5
# Slurm's words for "on no node".
_NO_NODES = ("(null)", "none assigned")
# Arguments of one call: far below the kernel's limit.
_IDS_AT_ONCE = 500
# Inside a job of another allocation these point at Slurm itself, not at that job.
_KEPT = ("SLURM_CONF", "SLURM_TIME_FORMAT")
# sacct's words for no database, and ours for no sacct.
_ABSENT = " is not installed"
_NO_RECORDS = ("accounting storage is disabled", f"sacct{_ABSENT}")
_LOST = ("DOWN", "FAIL", "ERROR", "NO_RESPOND", "UNKNOWN", "POWERED_DOWN")


@dataclass(frozen=True)
class JobState:
    """What Slurm says about one job or array task."""

    state: str
    reason: str = ""
    nodes: str = ""
    comment: str = ""

    @property
    def waits(self) -> bool:
        """Whether it may still be kept off a node."""
        return self.state in ("PENDING", "REQUEUED")


class SlurmError(RuntimeError):
    """A Slurm command failed or did not answer; the message has its own words."""


class NoAccountingError(SlurmError):
    """The cluster keeps no records of ended jobs."""


def states(job_ids: Collection[str]) -> dict[str, JobState]:
    """One squeue call about these jobs and array tasks; what Slurm has forgotten is left out.

    Raises:
        SlurmError: the controller does not answer.
    """
    main_ids = sorted({job_id.partition("_")[0] for job_id in job_ids})
    if not main_ids:
        return {}
    # Very many ids are not named: all of this user's jobs are cheaper then.
    named = ("--jobs", ",".join(main_ids)) if len(main_ids) <= _IDS_AT_ONCE else ()
    try:
        return _squeue(*named)
    except SlurmError as error:
        if "Invalid job id" in str(error):  # a single id that Slurm has forgotten
            return {}
        raise


def tagged(tags: Collection[str]) -> dict[str, JobState]:
    """This user's unfinished jobs whose comment is one of `tags` or begins with it and a dot.

    Raises:
        SlurmError: the controller does not answer.
    """
    mine = _squeue(states="PENDING,RUNNING,SUSPENDED,CONFIGURING")
    starts = tuple(f"{tag}." for tag in tags)
    return {
        job_id: job
        for job_id, job in mine.items()
        if job.comment in tags or job.comment.startswith(starts)
    }


def _squeue(*selection: str, states: str = "all") -> dict[str, JobState]:
    # --user makes the controller send this user's jobs alone.
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser()]
    command += ["--states", states, "--format", _SQUEUE_FORMAT, *selection]
    return parse_squeue(run(command))


def parse_squeue(text: str) -> dict[str, JobState]:
    """Lines of `_SQUEUE_FORMAT` by job id; a line of another form is not about a job."""
    rows = (line.split("|", _COLUMNS - 1) for line in text.splitlines())
    return {row[0]: JobState(*row[1:]) for row in rows if len(row) == _COLUMNS}


def accounted(job_ids: Collection[str], name_ends: tuple[str, ...]) -> dict[str, JobState]:
    """One sacct call about jobs that squeue has forgotten; only those whose name ends so.

    Raises:
        NoAccountingError: the cluster has no accounting database, or this host no sacct.
        SlurmError: the database does not answer.
    """
    main_ids = sorted({job_id.partition("_")[0] for job_id in job_ids})
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format", _SACCT_FORMAT]
    return parse_sacct(_records([*command, "--jobs", ",".join(main_ids)]), name_ends)


def parse_sacct(text: str, name_ends: tuple[str, ...]) -> dict[str, JobState]:
    """Lines of `_SACCT_FORMAT` by job id; the name tells our jobs from another cluster's."""
    rows = (line.split("|", _COLUMNS - 1) for line in text.splitlines())
    found = {}
    for job_id, state, exit_code, nodes, name in (row for row in rows if len(row) == _COLUMNS):
        if name.endswith(name_ends):
            code = f"ExitCode {exit_code}" if exit_code not in ("", "0:0") else ""
            ran_on = "" if nodes.lower() in _NO_NODES else nodes
            # CANCELLED by 1000
            found[job_id] = JobState(state.partition(" ")[0], code, ran_on)
    return found


def last_attempts(job_ids: Collection[str], name_ends: str) -> dict[str, JobState]:
    """How the last attempt of these requeued jobs ended, by one sacct; those that it knows.

    Raises:
        NoAccountingError: the cluster has no accounting database, or this host no sacct.
        SlurmError: the database does not answer.
    """
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates"]
    return parse_attempts(
        _records([*command, "--format", _ATTEMPTS_FORMAT, "--jobs", ",".join(sorted(job_ids))]),
        name_ends,
    )


def parse_attempts(text: str, name_ends: str) -> dict[str, JobState]:
    """Lines of `_ATTEMPTS_FORMAT`, a job's attempts in order: the last one that has ended."""
    rows = (line.split("|", _COLUMNS - 1) for line in text.splitlines())
    return {
        job_id: JobState(state.partition(" ")[0], nodes="" if nodes.lower() in _NO_NODES else nodes)
        for job_id, state, end, nodes, name in (row for row in rows if len(row) == _COLUMNS)
        if name.endswith(name_ends) and end != "Unknown"
    }


def _records(command: Sequence[str]) -> str:
    try:
        return run(command)
    except SlurmError as error:
        if any(words in str(error).lower() for words in _NO_RECORDS):
            raise NoAccountingError(str(error)) from error
        raise


def lost_nodes(nodes: Collection[str]) -> set[str]:
    """Those of `nodes` that are down or do not answer, by one sinfo.

    Raises:
        SlurmError: the controller does not answer.
    """
    if not nodes:
        return set()
    text = run(
        ["sinfo", "--noheader", "--Node", "--nodes", ",".join(sorted(nodes)), "--format", "%N|%T"]
    )
    rows = (line.partition("|") for line in text.splitlines())
    return {name for name, _, state in rows if is_lost(state.strip())}


def is_lost(state: str) -> bool:
    """Whether sinfo's word for a node's state is that of a lost one; `*` means no answer."""
    return state.endswith("*") or any(word in state.upper() for word in _LOST)


def expand(nodes: str) -> list[str]:
    """Names of a short form such as `n[1-3,7]`; Slurm's own words for none give none.

    Raises:
        SlurmError: the short form is not one.
    """
    if not re.search(r"[A-Za-z0-9]", nodes) or nodes.lower() in _NO_NODES:
        return []
    if "[" not in nodes and "," not in nodes:
        return [nodes]
    return run(["scontrol", "show", "hostnames", nodes]).split()


def exclude_from(job_ids: Collection[str], nodes: str) -> None:
    """Keep waiting jobs off `nodes` too; what they avoid already stays.

    Raises:
        SlurmError: the controller does not answer, or a job waits no longer.
    """
    if not job_ids:
        return
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser()]
    rows = run([*command, "--states", "PENDING", "--format", "%i|%x"]).splitlines()
    # An update replaces the list, so jobs with equal lists are updated together.
    alike: dict[str, list[str]] = {}
    for job_id, _, avoided in (row.strip().partition("|") for row in rows):
        if job_id in job_ids:
            own = "" if avoided.lower() in _NO_NODES else f"{avoided},"
            alike.setdefault(own.lstrip(",") + nodes, []).append(job_id)
    for avoided, ids in alike.items():
        for first in range(0, len(ids), _IDS_AT_ONCE):
            named = ",".join(ids[first : first + _IDS_AT_ONCE])
            run(["scontrol", "update", f"JobId={named}", f"ExcNodeList={avoided}"])


def largest_array() -> int:
    """The cluster's MaxArraySize - 1: the most tasks of an array that begins at 0.

    Raises:
        SlurmError: the controller does not answer.
    """
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", run(["scontrol", "show", "config"]), re.M)
    if match is None:
        raise SlurmError("scontrol show config names no MaxArraySize")
    return max(1, int(match[1]) - 1)


def cancel(job_ids: Sequence[str]) -> None:
    """scancel; jobs that have ended meanwhile are no error.

    Raises:
        SlurmError: the controller does not answer.
    """
    for first in range(0, len(job_ids), _IDS_AT_ONCE):
        run(["scancel", "--quiet", *job_ids[first : first + _IDS_AT_ONCE]])


def run(command: Sequence[str]) -> str:
    """A Slurm program's standard output.

    Raises:
        SlurmError: it is not installed, could not start, failed, or did not answer.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]}{_ABSENT} or not on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} does not answer after {_TIMEOUT:g} s") from error
    except OSError as error:  # such as no process or memory left for this user
        raise SlurmError(f"cannot run {command[0]}: {error}") from error
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
