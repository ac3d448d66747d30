"""Ending a server, also on a disk that takes no file any more, and one command at a time for it."""

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from shakedown.cluster.nodes import node_name
from shakedown.core.errors import StorageError
from shakedown.core.files import write_text
from shakedown.core.paths import ServerPaths
from shakedown.core.private import open_own, own_folder
from shakedown.inference import slurm
from shakedown.inference.folder import State, read_state
from shakedown.inference.processes import alive, end_orphans, gone, job_id, job_mark, job_state

Say = Callable[[str], None]
_STOP_SECONDS = 40.0  # the daemon's own grace time, and the kill after it


def stop_server(folder: ServerPaths, say: Say) -> str:
    """End the server, its daemon or its job; says what was done."""
    state, job = read_state(folder.state), job_id(folder)
    if not alive(folder):
        end_orphans(state)
        return "was not running"
    asked = _ask_to_stop(folder, say)
    waiting = job_state(folder)
    # A job in the queue has no daemon yet that could see the stop file.
    if not asked or (waiting is not None and waiting.waiting):
        _end(folder, state, job, signal.SIGTERM)
    if not gone(folder, _STOP_SECONDS):
        say("serve: the daemon does not answer, ending it")
        _end(folder, state, job, signal.SIGKILL)  # its guard ends the server
        gone(folder, _STOP_SECONDS)
    end_orphans(read_state(folder.state) or state)
    return "stopped"


def _end(folder: ServerPaths, state: State | None, job: str, signum: int) -> None:
    if job:
        slurm.cancel(job, job_mark(folder))
    elif state is not None and state.node == node_name():
        state.daemon.send(signum)


def _ask_to_stop(folder: ServerPaths, say: Say) -> bool:
    """Whether the daemon can see that it is asked: a full or read-only disk takes no file."""
    try:
        write_text(folder.stop, "stop\n")
    except StorageError as error:
        say(f"serve: {error}")
        return False
    return True


@contextlib.contextmanager
def locked(folder: ServerPaths) -> Iterator[None]:
    """One start, stop or restart of a server at a time, in a folder that only this user changes."""
    try:
        own_folder(folder.root)
        lock = os.fdopen(_open_lock(folder.lock), "rb")
    except OSError as error:
        raise StorageError(f"cannot use {folder.root}: {error.strerror}") from error
    with lock:
        # The kernel gives the lock back when its holder dies, so a killed start locks nobody out.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _open_lock(path: Path) -> int:
    try:
        return open_own(path, os.O_WRONLY)  # flock on NFS asks for a file that is open to write
    except OSError as error:
        # On a file system that has turned read-only a server can still be stopped.
        if error.errno != errno.EROFS:
            raise
        return open_own(path, os.O_RDONLY)
