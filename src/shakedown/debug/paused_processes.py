"""The processes that wait for a debugger, as files: one per process, readable only by its owner.

`<node>-<pid>.json` exists while a process is paused. It is touched every few seconds, so that a
killed process can be told from a paused one. `<node>-<pid>.continue` resumes it.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import read_json_as
from shakedown.core.leftovers import temporary_file

Reason = Literal["breakpoint", "exception", "debugger"]
TOUCH_SECONDS = 2.0
# Allows for several touches, a caching file server, and differing clocks.
SILENT_SECONDS = 30.0


@dataclass(frozen=True)
class PausedProcess:
    """A process that waits for a debugger or is stopped in one.

    `node`: Slurm's name, `host` the machine's; they differ where nodes share a machine. `port` is
    on the host's loopback and requires `token`. `attached`: a debugger is connected. `reason`: what
    stopped it; `debugger`: a step or a breakpoint of the debugger itself. `since`: Unix seconds.
    """

    node: str
    host: str
    pid: int
    role: str
    rank: int | None
    program: str
    file: str
    line: int
    function: str
    reason: Reason
    detail: str
    port: int
    token: str
    attached: bool
    since: float

    @property
    def name(self) -> str:
        """`trainer-rank1`; without a rank `agent 4711`."""
        return f"{self.role} {self.pid}" if self.rank is None else f"{self.role}-rank{self.rank}"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class PauseFile:
    """The file that says that this process is paused."""

    def __init__(self, folder: Path, node: str, pid: int) -> None:
        self.path = folder / f"{node}-{pid}.json"
        self._continue = self.path.with_suffix(".continue")

    def write(self, stop: PausedProcess) -> None:
        """Write it, readable only by its owner, as it holds the token.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            handle, partial = temporary_file(self.path)  # mode 0600
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(asdict(stop), stream, indent=2)
            os.replace(partial, self.path)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}") from error

    def touch(self) -> None:
        """Show that the process is still paused; a file that cannot be written is ignored."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def remove(self) -> None:
        for path in (self.path, self._continue):
            path.unlink(missing_ok=True)

    def told_to_continue(self) -> bool:
        """Whether the process was asked to resume; answers once per request."""
        try:
            self._continue.unlink()
        except OSError:
            return False
        return True


def make_folder(folder: Path) -> None:
    """Make the folder of paused processes, which nobody else can enter, whatever `group_reads`
    says.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(0o700, exist_ok=True)
    folder.chmod(0o700)


def read_stops(folder: Path) -> list[PausedProcess]:
    """The processes that are paused now, by role, rank and pid; damaged files are left out.

    Raises:
        UntrustedError: others could have written a file.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            stop = read_json_as(PausedProcess, path, "stop")
            silent = abs(time.time() - path.stat().st_mtime)
        except (UsageError, OSError):  # gone by now, or damaged
            continue
        if silent <= SILENT_SECONDS:
            found.append(stop)
    return sorted(found, key=lambda stop: (stop.role, stop.rank or 0, stop.node, stop.pid))


def let_go(folder: Path, stops: Iterable[PausedProcess]) -> None:
    """Ask processes to resume, by a file, as their loopback is on another machine.

    Raises:
        OSError: the file cannot be written.
    """
    for stop in stops:
        PauseFile(folder, stop.node, stop.pid).path.with_suffix(".continue").touch(0o600)


def describe(stop: PausedProcess) -> str:
    """`trainer-rank1 on n2 (pid 4711) at train.py:12 in step, at a breakpoint`."""
    why = {"breakpoint": "at a breakpoint", "exception": "after an exception"}
    how = why.get(stop.reason, "in a debugger") + (f": {stop.detail}" if stop.detail else "")
    return f"{stop.name} on {stop.node} (pid {stop.pid}) at {stop.place} in {stop.function}, {how}"
