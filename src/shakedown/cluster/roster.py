"""The processes of a supervisor, on file: if it is killed, its successor makes sure they are
gone."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shakedown.core.errors import RefusedError
from shakedown.core.files import read_json_as, write_json
from shakedown.processes.guard import Process, end, live_members, look
from shakedown.processes.identity import boot_id, pid_space

_GUARD_SECONDS = 30.0  # above the guard's own grace time and its kill
_GRACE_SECONDS = 2.0  # for processes left by a guard that was also killed
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Roster:
    """`sessions`: their leaders' process ids with their start times in clock ticks since `boot`.
    `guard`: those of the guard, which ends them all while it lives. `marks`: those of components
    whose descendants lead their own sessions.
    """

    guard: Sequence[int] = (0, 0)
    sessions: Mapping[str, int] = field(default_factory=dict)
    marks: Sequence[str] = ()
    boot: str = field(default_factory=boot_id)
    space: int = field(default_factory=pid_space)

    def write(self, path: Path) -> None:
        """Write it atomically as JSON."""
        write_json(path, asdict(self))


def end_left(path: Path) -> None:
    """End all processes of an existing roster that still run here, then remove it.

    Processes of a supervisor on another machine, whose lease was taken over, ended with its machine
    or Slurm job.

    Raises:
        RefusedError: remaining processes could not be ended, or may be another user's.
        UsageError: the roster cannot be read.
        UntrustedError: others could have written it.
    """
    if not path.exists():
        return
    roster = read_json_as(Roster, path, "roster")
    if (roster.boot, roster.space) == (boot_id(), pid_space()):
        _end(roster, path)
    remove(path)


def remove(path: Path) -> None:
    """Record that all are gone; if the disk is now read-only, the next supervisor finds out
    itself."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _end(roster: Roster, path: Path) -> None:
    deadline = time.monotonic() + _GUARD_SECONDS
    while _lives(*roster.guard) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    known = {int(number): started for number, started in roster.sessions.items()}
    # Without its leader, a session of that number may be a newer one, so it is not signalled.
    proven = {number: start for number, start in known.items() if _lives(number, start)}
    if live_members(proven, roster.marks):
        print(f"{path.parent}: ending processes of a killed supervisor", flush=True)
        end(proven, _GRACE_SECONDS, roster.marks)
    left = [each for each in live_members(known, roster.marks) if _is_own(each)]
    if left:
        numbers = ",".join(str(each.pid) for each in left)
        raise RefusedError(
            f"{path.parent}: processes {numbers} may be left over from a killed supervisor",
            hint=f"ps -o pid,user,lstart,stat,wchan,args -p {numbers}; if they are: kill -9 "
            + numbers.replace(",", " "),
        )


def _lives(pid: int, started: int) -> bool:
    found = look(pid) if pid > 0 else None
    return found is not None and found.started == started and not found.ended


def _is_own(process: Process) -> bool:
    try:
        return Path(f"/proc/{process.pid}").stat().st_uid == os.geteuid()
    except OSError:  # has ended meanwhile
        return False
