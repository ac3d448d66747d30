"""Which processes of a server are there: its daemon, its Slurm job, its session."""

import contextlib
import signal
import time

import psutil

from shakedown.cluster.guard import members, send
from shakedown.cluster.nodes import node_name
from shakedown.core.errors import ServerError
from shakedown.core.paths import ServerPaths
from shakedown.inference import slurm
from shakedown.inference.folder import State, read_state

POLL_SECONDS = 0.25
_GUARD_SECONDS = 25.0  # the guard of a killed daemon needs the grace time, then kills
_KILL_SECONDS = 10.0


def alive(folder: ServerPaths) -> bool:
    """Whether its daemon or its job is there."""
    state, job = read_state(folder.state), job_id(folder)
    # The daemon's own report counts first: Slurm may list the job as completing after that.
    if state is not None and state.phase == "ended":
        return False
    if job:
        found = slurm.job_state(job)
        # A controller that does not answer (None) is no sign that the job has ended.
        return found is None or not found.gone
    return state is not None and daemon_lives(state)


def daemon_lives(state: State) -> bool:
    """Whether the daemon's process is there; on another node it is believed to be."""
    # Processes of another node cannot be looked at from here.
    if state.node != node_name():
        return True
    try:
        daemon = psutil.Process(state.daemon_pid)
        # The start time tells the process from a later one with the same number. In a container
        # whose first process reaps nobody, a dead daemon stays as a zombie.
        ours = abs(daemon.create_time() - state.daemon_started) < 1.0
        return ours and daemon.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
        ServerError: some survived SIGKILL.
    """
    if state is None or not state.pid or state.node != node_name():
        return
    # First the guard of the killed daemon gets its time to end the session with SIGTERM and
    # SIGKILL. What it leaves is killed here and gets some seconds to be gone.
    for seconds in (_GUARD_SECONDS, _KILL_SECONDS):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not _session(state):
                return
            time.sleep(POLL_SECONDS)
        # Looked at again: the number may belong to somebody else's session by now.
        send({state.pid} if _session(state) else set(), signal.SIGKILL)
    raise ServerError(
        f"processes {_session(state)} of the server survived SIGKILL",
        hint="ps -o pid,stat,wchan -p",
    )


def _session(state: State) -> list[int]:
    """Living members of the server's session; none when its number belongs to someone else."""
    found = members({state.pid})
    for pid in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            # The server is the daemon's child: a member that is older is none of its processes.
            if psutil.Process(pid).create_time() < state.daemon_started - 1.0:
                return []
    return found


def job_id(folder: ServerPaths) -> str:
    return folder.job.read_text(encoding="utf-8").strip() if folder.job.exists() else ""
