"""A server's processes, its daemon or its Slurm job: whether they exist, and how to end them.

A server can be ended on a full disk, too; only one command at a time changes it.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shakedown.cluster.folder_lease import hold, holder_of
from shakedown.cluster.roster import end_left
from shakedown.core.errors import LaunchError, ServerError, StorageError, UsageError
from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.lease import Holder
from shakedown.core.paths import ServerPaths
from shakedown.core.private import own_folder, read_own
from shakedown.inference.folder import read_state
from shakedown.processes.identity import Recorded
from shakedown.slurm import jobs

POLL_SECONDS = 0.25
_STOP_SECONDS = 40.0  # the daemon's own grace time, and the kill after it

Say = Callable[[str], None]


def alive(folder: ServerPaths) -> bool:
    """Whether its daemon or its job exists."""
    state = read_state(folder.state)
    # The daemon's own report counts first: Slurm may list the job as completing after that.
    if state is not None and state.phase == "ended":
        return False
    if job_id(folder):
        found = job_state(folder)
        # A controller that does not answer (None) does not mean that the job has ended.
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
    """The server's Slurm job; empty where there is none.

    Raises:
        UsageError: the file does not hold a job id.
        UntrustedError: others could have written it.
    """
    text = _word(folder.job)
    # It becomes an argument of Slurm's programs, to which `1,2` and `--user=x` are many jobs.
    if text and jobs.JOB_ID.fullmatch(text) is None:
        raise UsageError(
            f"{folder.job} holds {text[:40]!r}: expected the number of one Slurm job",
            hint="squeue --me",
        )
    return text


def job_mark(folder: ServerPaths) -> str:
    return _word(folder.job_mark)


def _word(path: Path) -> str:
    return read_own(path, errors="replace").strip() if path.exists() else ""


def job_state(folder: ServerPaths) -> jobs.Job | None:
    """The state of the server's job: ended, too, when the number is another job's.

    None when it has none, or when Slurm could not be asked just now.
    """
    job = job_id(folder)
    if not job:
        return None
    try:
        found = jobs.ask([job]).get(job, jobs.Job("", "Slurm no longer knows it"))
    except LaunchError:
        return None
    if found.ended or found.bears(job_mark(folder)):
        return found
    return jobs.Job("", "the job with its number has not its mark")


def stop_server(folder: ServerPaths, say: Say) -> str:
    """End the server, its daemon or its job; says what was done.

    Raises:
        RefusedError: processes of a killed daemon are left, or may be somebody else's.
        ServerError: it could not be ended from here.
        LaunchError: its job could not be cancelled.
    """
    was_running = alive(folder)
    if was_running:
        _stop(folder, say)
    end_left(folder.roster)
    return "stopped" if was_running else "was not running"


def _stop(folder: ServerPaths, say: Say) -> None:
    asked = _ask_to_stop(folder, say)
    waiting = job_state(folder)
    # A job in the queue has no daemon yet that could see the stop file.
    if not asked or (waiting is not None and waiting.waits):
        _signal(folder, signal.SIGTERM)
    if gone(folder, _STOP_SECONDS):
        return
    say("serve: the daemon does not answer, ending it")
    _signal(folder, signal.SIGKILL)  # its guard ends the server
    if not gone(folder, _STOP_SECONDS):
        who = f"Slurm job {job_id(folder)}" if job_id(folder) else str(daemon_of(folder))
        raise ServerError(
            f"{folder.root}: its server was not ended: {who} is not known to be gone",
            hint=f"end it where it runs, then: shakedown serve stop {folder.root}",
        )


def _signal(folder: ServerPaths, signum: int) -> None:
    if job := job_id(folder):
        jobs.cancel_marked(job, job_mark(folder))
        return
    daemon = daemon_of(folder)
    if daemon is not None and daemon.within_reach(Holder.here("")):
        Recorded(daemon.pid, daemon.started, daemon.boot).send(signum)


def _ask_to_stop(folder: ServerPaths, say: Say) -> bool:
    """Whether the daemon can see the request: a full or read-only disk takes no file."""
    try:
        write_text(folder.stop, "stop\n")
    except StorageError as error:
        say(f"serve: {error}")
        return False
    return True


@contextlib.contextmanager
def turn(folder: ServerPaths, action: str, *, wait: bool = False) -> Iterator[None]:
    """One start, stop or restart of a server at a time, in a folder that only this user changes.

    Args:
        wait: wait for the other command instead of being refused.

    Raises:
        RefusedError: another command changes the server.
    """
    with storage_errors("use", folder.root):
        own_folder(folder.root)
    with hold(folder.root, f"shakedown serve {action}", wait=wait):
        yield
