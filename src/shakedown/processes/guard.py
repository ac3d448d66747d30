"""Find and signal sessions of processes; as a program, end them when their supervisor dies.

supervise.py runs `python -I -S guard.py GRACE`: this file imports nothing of the package.
Standard input carries `+PID STARTED [MARK]` and `-PID` lines (sessions to watch, sessions that are
gone); its end means that the supervisor is gone: SIGTERM, GRACE seconds, SIGKILL to what is left.
A mark is in the environment of a component whose descendants may lead sessions of their own.

A number alone does not identify a process: the system reuses it. A process is therefore known by
its number and its start, a session by its leader's.
"""

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

MARK = "SHAKEDOWN_COMPONENT"


class Process(NamedTuple):
    """A process at one moment; `started`, in ticks since boot, sets it apart from a later one."""

    pid: int
    started: int
    group: int
    session: int
    state: str
    parent: int = 0
    ticks: int = 0  # of CPU time, its own

    @property
    def ended(self) -> bool:
        """Whether it is a zombie: it no longer runs, and its number is not reused yet."""
        return self.state in "ZX"


def look(pid: int) -> Process | None:
    """The process that has this number now; None when there is none."""
    return look_into(f"/proc/{pid}")


def look_into(folder: str) -> Process | None:
    """The process, or the thread, of a folder of /proc; None when it is gone."""
    try:
        with open(f"{folder}/stat", encoding="utf-8", errors="replace") as stream:
            text = stream.read()
    except OSError:  # ended between a listing and this look
        return None
    # A program's name, in brackets, may itself hold blanks and brackets; behind the last one stand
    # state, parent, process group, session, as the 12th and 13th the CPU time of user and system,
    # and as the 20th the start (proc(5)).
    state, *fields = text.rpartition(")")[2].split()[:20]
    parent, group, session = map(int, fields[:3])
    ticks = int(fields[10]) + int(fields[11])
    pid = int(folder.rpartition("/")[2])
    return Process(pid, int(fields[18]), group, session, state, parent, ticks)


def processes() -> list[Process]:
    """All living processes that this one may see."""
    found = [look(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return [process for process in found if process is not None and not process.ended]


def members(sessions: Collection[int]) -> list[int]:
    """Living pids whose session has one of these numbers, whoever leads it."""
    return [process.pid for process in processes() if process.session in sessions]


def group(number: int, leader: int | None) -> list[Process]:
    """Living members of a process group of this process's own session.

    Args:
        leader: the start of the process that led it. A group whose number another process has by
            now has no members.
    """
    session = os.getsid(0)
    found = [p for p in processes() if p.group == number and p.session == session]
    now = look(number)
    return found if now is None or now.started == leader else []


def live_members(leaders: Mapping[int, int], marks: Collection[str] = ()) -> list[Process]:
    """Living members of sessions that are known by their leaders' number and start.

    With `marks` also processes of any session that have one, and all of their descendants:
    torchrun's workers lead sessions of their own, and some programs overwrite their environment.

    A session whose number now belongs to another process has none. One whose leader is gone still
    counts: the caller ensures that the number was not free in between. It is not free while the
    leader is unreaped, nor while the session has a member (alloc_pid in the kernel).
    """
    everyone = processes()
    found = [process for process in everyone if process.session in leaders]
    # After the listing: a number that was taken while it was made is noticed.
    now = {number: look(number) for number in {process.session for process in found}}
    found = [p for p in found if _is_led(now[p.session], leaders[p.session])]
    return found + _strays(everyone, {p.pid for p in found}, marks) if marks else found


def _strays(
    everyone: Collection[Process], found: set[int], marks: Collection[str]
) -> list[Process]:
    """Processes outside the sessions that have a mark, and descendants of any."""
    left = [process for process in everyone if process.pid not in found]
    strays = [process for process in left if _mark(process.pid) in marks]
    while strays:
        more = {p.pid for p in strays} - found
        found |= more
        children = [p for p in left if p.parent in found and p.pid not in found]
        if not children:
            break
        strays += children
    return strays


def _mark(pid: int) -> str:
    """The mark in a process's initial environment; empty if it has none or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            rows = stream.read().split(b"\0")
    except OSError:
        return ""
    front = f"{MARK}=".encode()
    return next(
        (r[len(front) :].decode("utf-8", "replace") for r in rows if r.startswith(front)), ""
    )


def _is_led(leader: Process | None, started: int) -> bool:
    return leader is None or leader.started == started


def send(found: Iterable[Process], signum: int) -> None:
    """Signal these processes and no later ones of their numbers.

    One that has ended is left out, and one that may not be signalled, as it runs as another user.
    """
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_one(process.pid, process.started, signum)


def send_one(pid: int, started: int, signum: int) -> None:
    """Signal the process that has this number and start.

    Raises:
        ProcessLookupError: it has ended; the number may be another one's by now.
        PermissionError: it runs as another user.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # before Linux 5.3, or no descriptor is left
        handle = -1
    try:
        # Looked at while the handle is held: what it stands for is this process or none.
        now = look(pid)
        if now is None or now.started != started:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if handle < 0:
            os.kill(pid, signum)
        else:
            signal.pidfd_send_signal(handle, signum)
    finally:
        if handle >= 0:
            os.close(handle)


def watch() -> tuple[dict[int, int], set[str]]:
    """Read the supervisor's lines until it is gone; return the sessions and marks that it left."""
    leaders: dict[int, tuple[int, str]] = {}
    for line in sys.stdin:
        pid, *more = line[1:].split()
        if line[0] == "+":
            leaders[int(pid)] = int(more[0]), "".join(more[1:])
        else:
            leaders.pop(int(pid), None)
    started = {pid: start for pid, (start, _) in leaders.items()}
    return started, {mark for _, mark in leaders.values() if mark}


def end(leaders: Mapping[int, int], grace: float, marks: Collection[str] = ()) -> None:
    """SIGTERM, `grace` seconds, SIGKILL to what is left of the sessions."""
    found = live_members(leaders, marks)
    send(found, signal.SIGTERM)
    # A stopped process takes SIGTERM only when it goes on.
    send(found, signal.SIGCONT)
    deadline = time.monotonic() + grace
    # A process that forks while it is killed needs more than one round.
    kills = 100
    while kills and (found := live_members(leaders, marks)):
        # A session that was seen empty is over: its number may be given to another one.
        leaders = {p.session: leaders[p.session] for p in found if p.session in leaders}
        if time.monotonic() >= deadline:
            send(found, signal.SIGKILL)
            kills -= 1
        time.sleep(0.05)


def main() -> None:
    """Watch, then end what is left."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to everyone; work is still to do
    leaders, marks = watch()
    if leaders:
        end(leaders, float(sys.argv[1]), marks)


if __name__ == "__main__":
    main()
