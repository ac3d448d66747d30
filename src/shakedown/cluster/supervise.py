"""Start a stage's processes, notice each end, and leave none behind.

Every component leads its own process session (start_new_session), so one signal reaches it and
its descendants. A guard process (guard.py) holds a pipe to the supervisor: when the supervisor
dies, even by SIGKILL, the guard ends every group. A pipe is used rather than
prctl(PR_SET_PDEATHSIG): that signal fires when the starting *thread* ends and reaches the
component alone, never its children (vLLM's engine core, data-loader workers, srun's tasks).

A component that has ended stays a zombie until its session is empty. The system does not reuse its
process id meanwhile, so no signal for the session can reach an unrelated process.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from shakedown.cluster.roster import Roster, remove
from shakedown.core.errors import LaunchError, StorageError
from shakedown.core.folders import storage_errors
from shakedown.core.leftovers import private_folder
from shakedown.core.private import make_folders, open_own
from shakedown.processes import guard
from shakedown.processes.guard import MARK, Process, live_members, look, send

_POLL_SECONDS = 0.02
_KILL_SECONDS = 10.0  # a killed process may have to finish an I/O wait first
_REAP_SECONDS = 1.0
_GUARD = Path(guard.__file__)


@dataclass(frozen=True)
class Component:
    """One process to supervise. `env` is laid over the supervisor's own environment.

    `stdin`: an open descriptor that it reads; nothing by default. `own_temporary`: TMPDIR is a
    folder that nobody else can enter and that is removed with it. `foreign`: its descendants may
    lead their own sessions, as torchrun's workers do; they are found by a mark, and end with it.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    own_temporary: bool = False
    stdin: int = subprocess.DEVNULL
    foreign: bool = False


@dataclass(frozen=True)
class Exit:
    """A component's end. `returncode` is -N after signal N; `seconds` is its lifetime."""

    component: Component
    returncode: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.component.name} {describe_exit(self.returncode)} after {self.seconds:.1f} s"


def describe_exit(returncode: int) -> str:
    """`exit code 3`, `killed by SIGKILL (out of memory?)`; shells and srun give 128 + signal."""
    if returncode < 0:
        return f"killed by {_signal_text(-returncode)}"
    if returncode > 128 and returncode - 128 in {s.value for s in signal.Signals}:
        return f"exit code {returncode} (a process under it: {_signal_text(returncode - 128)})"
    return f"exit code {returncode}"


def _signal_text(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name


@dataclass
class _Child:
    component: Component
    process: subprocess.Popen[bytes]
    leader: int  # its start in clock ticks since boot
    started: float
    mark: str = ""
    ended: bool = False

    @property
    def returncode(self) -> int | None:
        """The return code as in Popen, None while it runs; the process is not reaped."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored here, so the kernel reaps by itself
            return self.process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class Supervisor:
    """The owner of the components that it starts; leaving the `with` block ends all of them.

    Use it from one thread.
    """

    def __init__(self, *, grace: float = 10.0, roster: Path | None = None) -> None:
        """`grace`: seconds between SIGTERM and SIGKILL when the block is left, and in the guard.

        `roster`: the file that lists the processes while there are any.
        """
        self._grace, self._roster = grace, roster
        self._children: dict[str, _Child] = {}
        self._sessions: dict[
            int, _Child
        ] = {}  # sessions that may still have members, by their leaders
        self._guard: subprocess.Popen[bytes] | None = None
        self._folders = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(
            # -I -S: a fast start that nothing in the user's environment can break. Its own session
            # keeps the guard out of signals to the supervisor's process group.
            [sys.executable, "-I", "-S", os.fspath(_GUARD), str(self._grace)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.stop_all(self._grace)
        finally:
            self._reap()
            self._dismiss_guard()
            self._folders.close()
            if self._roster is not None:
                remove(self._roster)

    def start(self, component: Component) -> int:
        """Start a component and return its pid, which is also its group's and session's id.

        Both output streams are appended to the component's log.

        Raises:
            LaunchError: the program is missing or cannot be executed.
            StorageError: the log cannot be opened, or no temporary folder can be made.
            ValueError: a component of that name is running, or the `with` block was not entered.
        """
        if self._guard is None:
            raise ValueError("Supervisor.start() outside its `with` block")
        if component.name in self.running():
            raise ValueError(f"component {component.name!r} is already running")
        mark = f"{os.getpid()}.{time.time_ns()}.{component.name}" if component.foreign else ""
        environment = {
            **component.env,
            **self._temporary(component),
            **({MARK: mark} if mark else {}),
        }
        with _open_log(component.log) as log:
            process = _spawn(component, environment, log)
        leader = look(process.pid)  # exists at least as a zombie
        started = leader.started if leader is not None else 0
        child = _Child(component, process, started, time.monotonic(), mark)
        self._children[component.name] = self._sessions[process.pid] = child
        self._tell_guard(f"+{process.pid} {started} {mark}")
        self._write_roster()
        return process.pid

    def _write_roster(self) -> None:
        if self._roster is None or self._guard is None:
            return
        guard = look(self._guard.pid)
        sessions = {str(pid): child.leader for pid, child in self._sessions.items()}
        marks = [child.mark for child in self._sessions.values() if child.mark]
        known = (guard.pid, guard.started) if guard is not None else (0, 0)
        Roster(known, sessions, marks).write(self._roster)

    def _temporary(self, component: Component) -> dict[str, str]:
        """A temporary folder, removed when the block is left: until then a process of the session
        may use it."""
        if not component.own_temporary:
            return {}
        with storage_errors("make a temporary folder for", Path(component.name)):
            folder = self._folders.enter_context(private_folder("engine"))
        return {"TMPDIR": os.fspath(folder)}

    def poll(self) -> list[Exit]:
        """Components that ended since the last call, in the order they were started."""
        return [
            self._note_end(child, returncode)
            for child in self._children.values()
            if not child.ended and (returncode := child.returncode) is not None
        ]

    def running(self) -> dict[str, int]:
        """Name -> pid of the components that are still running."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.returncode is None
        }

    def signal(self, name: str, signum: int) -> None:
        """Send a signal to a component and its descendants, except those that have ended.

        Raises:
            KeyError: no component of that name was started.
        """
        send(self.members(name), signum)

    def members(self, name: str) -> list[Process]:
        """The living processes of a component, including itself.

        Raises:
            KeyError: no component of that name was started.
        """
        return self._living(self._children[name].process.pid)

    def stop_all(self, grace: float) -> list[Exit]:
        """End every component and its descendants: SIGTERM, `grace` seconds, SIGKILL.

        This includes descendants that outlived a component which ended by itself.

        Returns:
            The exits not yet reported by `poll`.

        Raises:
            LaunchError: a process survived SIGKILL (stuck in the kernel, e.g. on a dead disk).
        """
        sessions = list(self._sessions)
        found = self._living(*sessions)
        send(found, signal.SIGTERM)
        send(found, signal.SIGCONT)  # a stopped process receives SIGTERM only then
        if not self._gone(sessions, grace):
            send(self._living(*sessions), signal.SIGKILL)
            if not self._gone(sessions, _KILL_SECONDS):
                left = sorted(process.pid for process in self._living(*sessions))
                raise LaunchError(
                    f"processes {left} survived SIGKILL",
                    hint="check `cat /proc/PID/wchan`: a dead file system or driver blocks them",
                )
        ended = self.poll()
        # `poll` may just have forgotten some of them.
        for session in self._sessions.keys() & sessions:
            self._forget(self._sessions[session])
        return ended

    def _living(self, *sessions: int) -> list[Process]:
        """The living members of those sessions that are not forgotten."""
        known = [self._sessions[s] for s in sessions if s in self._sessions]
        leaders = {child.process.pid: child.leader for child in known}
        return live_members(leaders, {child.mark for child in known if child.mark})

    def _gone(self, sessions: Sequence[int], seconds: float) -> bool:
        """Wait until no session has a living member, at most `seconds` even if new ones appear."""
        deadline = time.monotonic() + seconds
        while True:
            if not self._living(*sessions):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def _note_end(self, child: _Child, returncode: int) -> Exit:
        child.ended = True
        pid = child.process.pid
        # Its descendants may outlive it; then the session is kept for `stop_all`.
        if not self._living(pid):
            self._forget(child)
        seconds = round(time.monotonic() - child.started, 3)
        return Exit(child.component, returncode, seconds)

    def _forget(self, child: _Child) -> None:
        """Forget a session without members: from now on its number may be reused."""
        # Tell the guard first: once reaped, the number is free.
        self._tell_guard(f"-{child.process.pid}")
        self._sessions.pop(child.process.pid, None)
        # Do not wait: a thread stuck in the kernel keeps its process from being reaped.
        child.process.poll()

    def _reap(self) -> None:
        """Reap processes that have ended, a moment later if their threads outlive them."""
        deadline = time.monotonic() + _REAP_SECONDS
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))

    def _tell_guard(self, line: str) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # a killed guard must not stop a run
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

    def _dismiss_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                guard.stdin.close()
            guard.wait()


def _open_log(path: Path) -> IO[bytes]:
    try:
        make_folders(path.parent)
        return os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab")
    except OSError as error:
        raise StorageError(f"cannot open log {path}: {error.strerror}") from error


def _spawn(component: Component, env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # Unbuffered, because the last lines before a kill or hang are the important ones.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
    try:
        return subprocess.Popen(
            component.argv,
            stdin=component.stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    # ValueError: a NUL byte in an argument. IndexError: no arguments at all.
    except (OSError, ValueError, IndexError) as error:
        program = component.argv[0] if component.argv else "(empty command)"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise LaunchError(
            f"cannot start {component.name}: {program}: {reason}",
            hint=f"command -v {program}",
        ) from error
