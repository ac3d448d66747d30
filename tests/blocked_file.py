"""A file whose next open for writing blocks in the kernel, as on a mount that does not answer."""

import fcntl
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def blocked_heartbeat(path: Path, pid: int) -> Iterator[None]:
    """The heartbeat of the beating process `pid` can be read, but not be written any more.

    A lease of ours makes the kernel hold back whoever opens the file for writing. Leaving the
    block lets it go on.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # how the kernel asks for the lease
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    # its open file refuses the next record, so it opens another one
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _until(lambda: _leased(descriptor), "the lease")
        _until(lambda: _stands(pid), "a thread that stands in open(2)")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


def _leased(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:  # it is open for writing
        return False
    return True


def _stands(pid: int) -> bool:
    places = Path(f"/proc/{pid}/task").glob("*/wchan")
    return any(place.read_text() == "__break_lease" for place in places)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.005)
