"""Queries to Slurm: states of our jobs, jobs by name, states of nodes; and cancelling.

Slurm's programs take options from variables of the environment, which outrank what a batch script
says. So each of them gets an environment without any (`environment`), and every option as an
argument.
"""

import os
import re
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

# Slurm's clients give up by themselves after MessageTimeout, 10 s by default; this ends one that
# hangs all the same.
_TIMEOUT = 60.0
# squeue's columns: id with array index, state, reason, nodes, expected start, name. The name is
# last: only other jobs' names may hold the separator.
_SQUEUE_FORMAT = "%i|%T|%r|%N|%S|%j"
_SQUEUE_COLUMNS = 6
_SACCT_FORMAT = "JobID,State,ExitCode,NodeList,JobName"
_ATTEMPTS_FORMAT = "JobID,State,End,NodeList,JobName"
_SACCT_COLUMNS = 5
# The id of a job or array task; scancel would accept much more.
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
# Slurm's words for "on no node".
_NO_NODES = ("(null)", "none assigned")
# Arguments of one call: far below the kernel's limit.
_IDS_AT_ONCE = 500
# Prefixes of variables from which Slurm's programs read options.
_OPTION_VARIABLE = re.compile(
    r"S(LURMD?|BATCH|RUN|ALLOC|QUEUE|ACCT|ACCTMGR|INFO|CANCEL|CONTROL|DIAG|STAT|PRIO|SHARE)_"
)
# These say where Slurm is and who asks, not what is asked.
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# scancel's words for a job that needs no cancelling any more.
_GONE = ("invalid job id", "already completing or completed")
# sacct's words for no database, and ours for no sacct.
_ABSENT = " is not installed"
_NO_RECORDS = ("accounting storage is disabled", f"sacct{_ABSENT}")
# States that a job does not leave by itself. Every other word is one of a job that lives: Slurm
# gets new ones with its releases (EXPEDITING in 25.11).
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
    | {"DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)
# Held jobs among them, whose state some versions of Slurm name otherwise.
WAITS = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_LOST = ("DOWN", "FAIL", "ERROR", "NO_RESPOND", "UNKNOWN", "POWERED_DOWN")


@dataclass(frozen=True)
class JobState:
    """Slurm's state of one job or array task; `start`: its expected start."""

    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    name: str = ""

    @property
    def waits(self) -> bool:
        """Whether it may still be kept off a node."""
        return self.state in WAITS

    @property
    def has_ended(self) -> bool:
        """Whether only Slurm itself, by a requeue, could run it again."""
        return self.state in ENDED


class SlurmError(RuntimeError):
    """A Slurm command failed or did not answer; the message has its own words."""


class NoAccountingError(SlurmError):
    """The cluster keeps no records of ended jobs."""


def states(job_ids: Collection[str], cluster: str = "") -> dict[str, JobState]:
    """squeue's states of these jobs and array tasks, without those that Slurm has forgotten.

    One call, which the controller answers with this user's jobs alone. Only those that are not
    among them cost another one, by their ids and without any filter: absence is an answer to that
    question alone.

    Args:
        cluster: one of several that share a database; empty: the one of this host.

    Raises:
        SlurmError: the controller does not answer.
    """
    ids = _main_ids(job_ids)
    if not ids:
        return {}
    # Very many ids are not named: all of this user's jobs are cheaper then.
    found = _by_id(cluster, ids if len(ids) <= _IDS_AT_ONCE else (), *_of_user())
    missing = _main_ids(set(job_ids) - found.keys())
    for first in range(0, len(missing), _IDS_AT_ONCE):
        found |= _by_id(cluster, missing[first : first + _IDS_AT_ONCE])
    return found


def _main_ids(job_ids: Collection[str]) -> list[str]:
    """The ids of arrays and single jobs."""
    return sorted({job_id.partition("_")[0] for job_id in job_ids})


def _by_id(cluster: str, ids: Sequence[str], *selection: str) -> dict[str, JobState]:
    try:
        return _squeue(cluster, *(("--jobs", ",".join(ids)) if ids else ()), *selection)
    except SlurmError as error:
        if "Invalid job id" in str(error):  # a single id that Slurm has forgotten
            return {}
        raise


def _of_user() -> tuple[str, str]:
    """The controller sends this user's jobs alone. By number: LOGNAME and USER may lie."""
    return "--user", str(os.getuid())


def unfinished(cluster: str = "") -> dict[str, JobState]:
    """All of this user's jobs that have not ended, also those that are held after a requeue.

    Raises:
        SlurmError: the controller does not answer.
    """
    return {i: job for i, job in _squeue(cluster, *_of_user()).items() if not job.has_ended}


def _squeue(cluster: str, *selection: str) -> dict[str, JobState]:
    # --all: of hidden partitions, too.
    command = ["squeue", "--noheader", "--array", "--all", *_at(cluster), *selection]
    return parse_squeue(run([*command, "--states", "all", "--format", _SQUEUE_FORMAT]))


def _at(cluster: str) -> list[str]:
    return ["--clusters", cluster] if cluster else []


def parse_squeue(text: str) -> dict[str, JobState]:
    """Lines of `_SQUEUE_FORMAT` by job id; a line of another form is not about a job."""
    rows = (line.split("|", _SQUEUE_COLUMNS - 1) for line in text.splitlines())
    return {row[0]: JobState(*row[1:]) for row in rows if len(row) == _SQUEUE_COLUMNS}


def accounted(
    job_ids: Collection[str], names: Collection[str], cluster: str = ""
) -> dict[str, JobState]:
    """One sacct call about jobs that squeue has forgotten; only those with one of the names.

    Raises:
        NoAccountingError: the cluster has no accounting database, or this host no sacct.
        SlurmError: the database does not answer.
    """
    command = ["sacct", "--noheader", "--parsable2", "--allocations", *_at(cluster)]
    command += ["--format", _SACCT_FORMAT, "--jobs", ",".join(_main_ids(job_ids))]
    return parse_sacct(_records(command), names)


def parse_sacct(text: str, names: Collection[str]) -> dict[str, JobState]:
    """Lines of `_SACCT_FORMAT` by job id; the name tells our jobs from another cluster's."""
    found = {}
    for job_id, state, exit_code, nodes, name in _sacct_rows(text):
        if name in names:
            code = f"ExitCode {exit_code}" if exit_code not in ("", "0:0") else ""
            ran_on = "" if nodes.lower() in _NO_NODES else nodes
            # CANCELLED by 1000
            found[job_id] = JobState(state.partition(" ")[0], code, ran_on, name=name)
    return found


def _sacct_rows(text: str) -> Iterator[list[str]]:
    rows = (line.split("|", _SACCT_COLUMNS - 1) for line in text.splitlines())
    return (row for row in rows if len(row) == _SACCT_COLUMNS)


def last_attempts(job_ids: Collection[str], names: Collection[str]) -> dict[str, JobState]:
    """How the last attempt of these requeued jobs ended, by one sacct; those that it knows.

    Raises:
        NoAccountingError: the cluster has no accounting database, or this host no sacct.
        SlurmError: the database does not answer.
    """
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates"]
    return parse_attempts(
        _records([*command, "--format", _ATTEMPTS_FORMAT, "--jobs", ",".join(sorted(job_ids))]),
        names,
    )


def parse_attempts(text: str, names: Collection[str]) -> dict[str, JobState]:
    """Lines of `_ATTEMPTS_FORMAT`, a job's attempts in order: the last one that has ended."""
    return {
        job_id: JobState(state.partition(" ")[0], nodes="" if nodes.lower() in _NO_NODES else nodes)
        for job_id, state, end, nodes, name in _sacct_rows(text)
        # An attempt without an end is the one that runs now.
        if name in names and end != "Unknown"
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


def all_nodes() -> set[str]:
    """The cluster's nodes, by one sinfo.

    Raises:
        SlurmError: the controller does not answer.
    """
    return set(run(["sinfo", "--noheader", "--Node", "--format", "%N"]).split())


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
    command = ["squeue", "--noheader", "--array", "--all", *_of_user()]
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


def cancel(job_ids: Sequence[str], *, cluster: str = "") -> None:
    """scancel by ids that sbatch gave; jobs that have ended meanwhile are no error.

    An id of an earlier run may be another cluster's job: then ask Slurm for its name just before.

    Args:
        job_ids: of single jobs, arrays or array tasks.

    Raises:
        SlurmError: the controller does not answer.
        ValueError: an id that is none; nothing was cancelled.
    """
    for job_id in job_ids:
        # To scancel `--user=x` or an empty list of names means many jobs.
        if _JOB_ID.fullmatch(job_id) is None:
            raise ValueError(f"{job_id!r} is not the id of one Slurm job")
    for first in range(0, len(job_ids), _IDS_AT_ONCE):
        try:
            run(["scancel", "--quiet", *_at(cluster), *job_ids[first : first + _IDS_AT_ONCE]])
        except SlurmError as error:
            refusals = [line for line in str(error).splitlines() if "error:" in line]
            if not refusals or not all(
                any(words in line.lower() for words in _GONE) for line in refusals
            ):
                raise


def run(command: Sequence[str]) -> str:
    """A Slurm program's standard output.

    Raises:
        SlurmError: it is not installed, could not start, failed, or did not answer.
    """
    try:
        # A session of its own: Ctrl-C must not cut an sbatch short, whose job would be unheard.
        process = subprocess.Popen(
            command,
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]}{_ABSENT} or not on the PATH") from error
    except OSError as error:  # such as no process or memory left for this user
        raise SlurmError(f"cannot run {command[0]}: {error}") from error
    with process:
        try:
            out, words = process.communicate(timeout=_TIMEOUT)
        except BaseException as error:
            # A site's wrapper may have children that hold the pipes open.
            _kill_group(process.pid)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SlurmError(
                    f"{command[0]} does not answer after {_TIMEOUT:g} s{_so_far(error)}"
                ) from error
            raise
    if process.returncode:
        raise SlurmError(f"{command[0]}: {(words or out).strip()}")
    return out


def _kill_group(child: int) -> None:
    """Kill our child's process group; nothing once the child was reaped: whose the number is then
    nobody knows."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # a look, it reaps nothing
        os.killpg(child, signal.SIGKILL)


def _so_far(error: subprocess.TimeoutExpired) -> str:
    """A program's output before its time limit: sbatch retries by itself and says why."""
    words = error.stderr or b""
    text = (words if isinstance(words, str) else words.decode(errors="replace")).strip()
    return f": {text}" if text else ""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what Slurm's programs would read options from."""
    return {name: value for name, value in environ.items() if not _is_option(name)}


def options_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that `environment` leaves out but a job must still find in its environment.

    `SBATCH_ACCOUNT` and the like are the user's, for programs that the job calls. `SLURM_...` tells
    of the allocation in which a process runs, and Slurm gives the job its own.
    """
    return {
        name: value
        for name, value in environ.items()
        if _is_option(name) and not name.startswith("SLURM")
    }


def ignored_choices(environ: Mapping[str, str]) -> list[str]:
    """Variables by which a user chooses, for plain sbatch, what the executor has resources for."""
    return sorted(name for name in environ if re.match(r"SBATCH_|SLURM_CLUSTERS$", name))


def _is_option(name: str) -> bool:
    return name not in _KEPT and _OPTION_VARIABLE.match(name) is not None
