"""What tells a process from every other one: its number, its start, and where the number counts."""

import os
from pathlib import Path

from shakedown.processes.guard import look

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Changes at every start of the machine; its name where the kernel does not show it."""
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
