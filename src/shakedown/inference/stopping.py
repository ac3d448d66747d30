"""Ending a server, also on a disk that takes no file any more, and one command at a time for it."""

import contextlib
import signal
from collections.abc import Callable, Iterator

from shakedown.cluster.held import hold
from shakedown.cluster.roster import end_left
from shakedown.core.errors import ServerError, StorageError
from shakedown.core.files import write_text
from shakedown.core.folders import storage_errors
from shakedown.core.lease import Holder
from shakedown.core.paths import ServerPaths
from shakedown.core.private import own_folder
from shakedown.inference import slurm
from shakedown.inference.processes import alive, daemon_of, gone, job_id, job_mark, job_state
from shakedown.processes.recorded import Recorded

Say = Callable[[str], None]
_STOP_SECONDS = 40.0  # the daemon's own grace time, and the kill after it


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
        slurm.cancel(job, job_mark(folder))
        return
    daemon = daemon_of(folder)
    if daemon is not None and daemon.within_reach(Holder.here("")):
        Recorded(daemon.pid, daemon.started, daemon.boot).send(signum)


def _ask_to_stop(folder: ServerPaths, say: Say) -> bool:
    """Whether the daemon can see that it is asked: a full or read-only disk takes no file."""
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
        wait: come second, instead of being refused.

    Raises:
        RefusedError: another command changes the server.
    """
    with storage_errors("use", folder.root):
        own_folder(folder.root)
    with hold(folder.root, f"shakedown serve {action}", wait=wait):
        yield
