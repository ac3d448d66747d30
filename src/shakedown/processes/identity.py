"""Identity of a process: its number and start, the machine's boot, and the space of numbers.

A number alone may be another process's: `Recorded` finds again a process that was written down.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shakedown.processes.guard import Process, look, send

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The id of this boot; the machine's name where the kernel does not show one."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not every container shows it
        return os.uname().nodename


def pid_space() -> int:
    """The space of this process's numbers, as a container has its own; 0 where it is hidden."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def started(pid: int) -> int:
    """When a living process started, in clock ticks since the boot; 0 where there is none."""
    process = look(pid)
    return 0 if process is None or process.ended else process.started


@dataclass(frozen=True)
class Recorded:
    """A process; `started` in clock ticks since the start of the machine, which `boot` names."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The living process that has this number now.

        Raises:
            ProcessLookupError: there is none.
        """
        found = look(pid)
        if found is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, found.started, boot_id())

    @property
    def found(self) -> Process | None:
        """The process, even as a zombie; None when it is gone or ran before the last boot."""
        # Empty and 0 are what a record says of a process that was never started.
        if self.pid <= 0 or not self.boot or self.boot != boot_id():
            return None
        process = look(self.pid)
        return process if process is not None and process.started == self.started else None

    @property
    def lives(self) -> bool:
        """Whether it runs on this machine."""
        process = self.found
        return process is not None and not process.ended

    def send(self, signum: int) -> None:
        """Signal it, and no other process; nothing when it is gone."""
        process = self.found
        send([] if process is None else [process], signum)
