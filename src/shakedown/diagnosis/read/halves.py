"""Reading many files in two processes, where nothing speaks against a second one.

The second half goes to a forked child, which leaves its results in memory that both share. Where
they are not complete (no memory, killed) this process reads that half itself.
"""

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import IO, TypeVar

File = TypeVar("File")
Result = TypeVar("Result")

MIN_FILES = 512  # below, a fork costs as much as it gains
_PORTION = 512  # files whose results are written together


def read_all(files: Sequence[File], read: Callable[[File], Result]) -> list[Result]:
    """`read` of every file, in order."""
    if len(files) < MIN_FILES or not _may_fork():
        return list(map(read, files))
    # the child's results have to be carried over: it gets a little less
    cut = len(files) * 53 // 100
    try:
        with open(os.memfd_create("shakedown-hang"), "w+b") as shared:
            mine = _read_beside(shared, files, read, cut)
            theirs: list[Result] | None = _results(shared, len(files) - cut)
    except OSError:  # no process or no memory to be had
        return list(map(read, files))
    return [*mine, *(theirs if theirs is not None else map(read, files[cut:]))]


def _read_beside(
    shared: IO[bytes], files: Sequence[File], read: Callable[[File], Result], cut: int
) -> list[Result]:
    """The files before `cut`, while a child writes the results of the others into `shared`."""
    child = os.fork()
    if child == 0:
        _write_and_exit(shared, map(read, files[cut:]))
    try:
        mine = list(map(read, files[:cut]))
        _wait(child)
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _wait(child)
        raise
    return mine


def _may_fork() -> bool:
    """A second CPU, and no thread, whose locks a forked child would find closed for ever."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "sched_getaffinity")):
        return False
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        return False
    return threads == 1 and len(os.sched_getaffinity(0)) > 1


def _write_and_exit(shared: IO[bytes], results: Iterator[object]) -> None:
    """The child's part; nothing that its parent has prepared for its own end may run in it."""
    code = 1
    try:
        while portion := list(islice(results, _PORTION)):
            pickle.dump(portion, shared, pickle.HIGHEST_PROTOCOL)
        shared.flush()
        code = 0
    finally:
        os._exit(code)


def _wait(child: int) -> None:
    with suppress(ChildProcessError):  # whoever ignores SIGCHLD has no children to wait for
        os.waitpid(child, 0)


def _results(shared: IO[bytes], count: int) -> list[Result] | None:
    """What the child wrote; None when it did not come to its end. Nobody else can write there."""
    shared.seek(0)
    found: list[Result] = []
    while len(found) < count:
        try:
            found += pickle.load(shared)  # noqa: S301
        except (EOFError, pickle.UnpicklingError):
            return None
    return found
