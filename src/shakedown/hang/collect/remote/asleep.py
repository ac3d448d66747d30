"""Proof that threads did not run while their memory was read.

A thread that has no CPU between two moments and is not switched away from one until later never
ran between them: `syscall` waits until the thread is off its CPU (or says `running`), and `status`
counts the switches (proc(5)). What such threads own is as still as if they had been paused.
"""

import os
from collections.abc import Sequence

from shakedown.hang.collect.remote.memory import Moved, Unreadable

MAX_THREADS = 1024
_SWITCHES = b"\nvoluntary_ctxt_switches:"
_STATE = b"\nState:\t"


class Asleep:
    """Threads of a process that are asleep from its making until `confirm`."""

    def __init__(self, pid: int, tids: Sequence[int]) -> None:
        """
        Raises:
            Unreadable: one of them is not a sleeping thread of the process.
        """
        self._folders = [f"/proc/{pid}/task/{tid}" for tid in tids]
        self._switches = [_switches(folder) for folder in self._folders]
        self._blocked()

    def confirm(self) -> None:
        """
        Raises:
            Unreadable: one of them may have run.
        """
        self._blocked()
        if [_switches(folder) for folder in self._folders] != self._switches:
            raise Moved("a thread ran meanwhile")

    def _blocked(self) -> None:
        for folder in self._folders:
            call = _read(f"{folder}/syscall")
            if not call or call.startswith(b"running"):
                raise Moved("a thread runs")


def _switches(folder: str) -> bytes:
    """How often the thread gave up its CPU, or lost it."""
    status = _read(f"{folder}/status")
    if status.partition(_STATE)[2][:1] != b"S":
        raise Moved("a thread does not sleep")
    counts = status.partition(_SWITCHES)[2]
    if not counts:
        raise Unreadable("the kernel does not count the switches of a thread")
    return counts


def _read(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(file, 16384)
        finally:
            os.close(file)
    except OSError as error:
        raise Unreadable(f"{path.rpartition('/')[2]} of a thread: {error.strerror}") from error
