"""Which processes of a server are there: its daemon, its Slurm job."""

import re
import time
from pathlib import Path

from shakedown.cluster.held import holder_of
from shakedown.core.errors import LaunchError, UsageError
from shakedown.core.lease import Holder
from shakedown.core.paths import ServerPaths
from shakedown.core.private import read_own
from shakedown.inference.folder import read_state
from shakedown.slurm.jobs import Job, ask

POLL_SECONDS = 0.25
_JOB_ID = re.compile(r"[1-9][0-9]{0,9}")


def alive(folder: ServerPaths) -> bool:
    """Whether its daemon or its job is there."""
    state = read_state(folder.state)
    # The daemon's own report counts first: Slurm may list the job as completing after that.
    if state is not None and state.phase == "ended":
        return False
    if job_id(folder):
        found = job_state(folder)
        # A controller that does not answer (None) is no sign that the job has ended.
        return found is None or not found.ended
    return daemon_of(folder) is not None


def daemon_of(folder: ServerPaths) -> Holder | None:
    """The process that keeps the server, unless it is proven to be gone."""
    return holder_of(folder.daemon)


def gone(folder: ServerPaths, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(folder):
            return True
        time.sleep(POLL_SECONDS)
    return False


def job_id(folder: ServerPaths) -> str:
    """The server's Slurm job; empty where it is none.

    Raises:
        UsageError: what is written there is no job's id.
        UntrustedError: others could have written it.
    """
    text = _word(folder.job)
    # It becomes an argument of Slurm's programs, to which `1,2` and `--user=x` are many jobs.
    if text and _JOB_ID.fullmatch(text) is None:
        raise UsageError(
            f"{folder.job} holds {text[:40]!r}: expected the number of one Slurm job",
            hint="squeue --me",
        )
    return text


def job_mark(folder: ServerPaths) -> str:
    return _word(folder.job_mark)


def _word(path: Path) -> str:
    return read_own(path, errors="replace").strip() if path.exists() else ""


def job_state(folder: ServerPaths) -> Job | None:
    """What the server's job does: ended, too, when the number is another job's.

    None when it has none, or when Slurm could not be asked just now.
    """
    job = job_id(folder)
    if not job:
        return None
    try:
        found = ask([job]).get(job, Job("", "Slurm no longer knows it"))
    except LaunchError:
        return None
    if found.ended or found.bears(job_mark(folder)):
        return found
    return Job("", "the job with its number has not its mark")
