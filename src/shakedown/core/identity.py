"""What tells a process from every other one: its number, its start, and where the number counts."""

import os
from pathlib import Path

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
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # A program's name, in brackets, may hold blanks and brackets; behind it, from the third field
    # on, stand the state and as the 22nd the start (proc(5)).
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
