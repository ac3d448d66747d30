"""Which processes of a server are there: its daemon, its Slurm job, its session."""

import os
import re
import signal
import time
from pathlib import Path

from shakedown.cluster.guard import Process, living, send
from shakedown.cluster.nodes import node_name
from shakedown.core.errors import ServerError, UsageError
from shakedown.core.identity import boot_id
from shakedown.core.paths import ServerPaths
from shakedown.core.private import read_own
from shakedown.inference import slurm
from shakedown.inference.folder import State, read_state

POLL_SECONDS = 0.25
_GUARD_SECONDS = 25.0  # the guard of a killed daemon needs the grace time, then kills
_KILL_SECONDS = 10.0
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
        return found is None or not found.gone
    return state is not None and daemon_lives(state)


def daemon_lives(state: State) -> bool:
    """Whether the daemon's process is there; on another node it is believed to be."""
    # Processes of another node cannot be looked at from here.
    if state.node != node_name():
        return True
    return state.daemon.lives


def gone(folder: ServerPaths, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(folder):
            return True
        time.sleep(POLL_SECONDS)
    return False


def end_orphans(state: State | None) -> None:
    """See that no process of the server's session is left on this node.

    Raises:
        ServerError: some survived SIGKILL, or may be the server's and are not proven to be.
    """
    # An ended server's numbers may be anybody's.
    if state is None or state.phase == "ended" or state.node != node_name():
        return
    # Once its leader was seen, a session keeps its number while it has a member. Without a leader
    # it may be a later one: it is waited for, as the guard may be ending it, and never signalled.
    proven = state.server.found is not None
    # First the guard of the killed daemon gets its time to end the session with SIGTERM and
    # SIGKILL. What it leaves is killed here and gets some seconds to be gone.
    for seconds in (_GUARD_SECONDS, _KILL_SECONDS) if proven else (_GUARD_SECONDS,):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not _session(state, proven=proven):
                return
            time.sleep(POLL_SECONDS)
        if proven:
            send(_session(state, proven=proven), signal.SIGKILL)
    left = [process.pid for process in _session(state, proven=proven)]
    if not left:
        return
    raise ServerError(
        f"processes {left} of the server survived SIGKILL"
        if proven
        else f"processes {left} may be the server's, whose first process is gone: none was ended",
        hint=f"ps -o pid,user,lstart,stat,wchan,args -p {','.join(map(str, left))}",
    )


def _session(state: State, *, proven: bool) -> list[Process]:
    """Living members of the session with the server's number; unproven ones of this user alone."""
    if not state.pid or state.boot != boot_id():
        return []
    found = living({state.pid: state.ticks})
    return [process for process in found if proven or _owner(process.pid) == os.geteuid()]


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:  # ended meanwhile
        return None


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


def job_state(folder: ServerPaths) -> slurm.JobState | None:
    """What the server's job does: gone, too, when the number is another job's.

    None when it has none, or when Slurm could not be asked just now.
    """
    job = job_id(folder)
    found = slurm.job_state(job) if job else None
    if found is None or found.gone or found.bears(job_mark(folder)):
        return found
    return slurm.JobState("", "the job with its number has not its mark")
