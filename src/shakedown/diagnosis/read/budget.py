"""What one analysis may take over all of its inputs: bytes, CPU time and memory."""

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shakedown.core.isolated import CallLimits

# 16,384 dumps of py-spy take 5 s and 120 MB, see docs/benchmarks.md: nobody's job comes near these,
# and a login node bears them.
BYTES = 2 * 2**30  # read, or expanded from gz
SECONDS = 60  # of CPU time, for all that is done
READING = 40  # of them: judging what was read takes some, too
ONE_FILE = 10  # of them: a crafted file leaves the others their time
MEMORY = 900 * 10**6  # beside some 60 MB that the command has before it reads

# Asking the kernel takes as long as reading a small file; a megabyte becomes 64 at most.
_ASK_AFTER = 2**20


class OutOfTime(BaseException):
    """Raised in the middle of a file; no Exception, as readers catch those of damaged content."""


def limits(factor: int = 1) -> CallLimits:
    """What the process that reads and judges may take; `factor` times the usual."""
    return CallLimits(SECONDS * factor, MEMORY * factor)


class Budget:
    """What is left of it. The clock runs from here on, and counts the CPU time of this process."""

    def __init__(self, factor: int = 1) -> None:
        self._bytes, self._allowed = BYTES * factor, BYTES * factor
        self._seconds, self._one_file = READING * factor, ONE_FILE * factor
        self._deadline = time.process_time() + self._seconds
        # The last quarter is for judging.
        self._memory = MEMORY * factor * 3 // 4
        self._most = _address_space() + self._memory
        self._unasked, self._full = 0, False
        self._handles = self._armed = False

    def take(self, count: int) -> None:
        """`count` bytes were read."""
        self._bytes -= count
        self._unasked += count
        if self._unasked >= _ASK_AFTER:
            self._unasked = 0
            self._full = _address_space() > self._most

    def spent(self) -> str:
        """Why no further file may be read; empty while one may."""
        if self._bytes <= 0:
            return f"the {self._allowed / 2**30:.0f} GiB for all inputs are used up"
        if time.process_time() >= self._deadline:
            return f"the {self._seconds} s of CPU time for reading all inputs are used up"
        if self._full:
            return f"the {self._memory / 1e6:.0f} MB of memory for all inputs are used up"
        return ""

    def why_cut(self) -> str:
        """Why the file in which OutOfTime was raised was not read to its end."""
        return self.spent() or f"takes more than {self._one_file} s of CPU time"

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Let `alarm` work inside; elsewhere than in the main thread it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGPROF, self._expire)
        self._handles = True
        try:
            yield
        finally:
            self._handles = False
            signal.signal(signal.SIGPROF, before or signal.SIG_DFL)

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """One file's reading: OutOfTime is raised inside once it has used its time."""
        if not self._handles:
            yield
            return
        left = min(self._one_file, self._deadline - time.process_time())
        self._armed = True
        signal.setitimer(signal.ITIMER_PROF, max(left, 0.001))
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _expire(self, _signum: int, _frame: FrameType | None) -> None:
        # The signal may come after the file's end.
        if self._armed:
            raise OutOfTime


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[0]) * resource.getpagesize()
