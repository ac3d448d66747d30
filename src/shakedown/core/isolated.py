"""A function run in its own process: bounded in CPU time and memory, stopped at once by Ctrl-C.

Python runs signal handlers between its own instructions. One call into C (a pickle, a JSON file)
that hostile input prolongs to minutes would delay Ctrl-C, and a time limit, just as long; a memory
limit would end the program without an answer.
"""

import fcntl
import os
import pickle
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from shakedown.core.errors import UsageError

Returned = TypeVar("Returned")

_OUT_OF_MEMORY = 86  # exit status of a child that is used for nothing else here
_REAPED_WITHIN = 0.2  # seconds


@dataclass(frozen=True)
class CallLimits:
    """Limits of a call: seconds of CPU time, and bytes of address space beyond the caller's."""

    seconds: int
    memory: int


def run_isolated(
    function: Callable[[], Returned], limits: CallLimits, *, hint: str = ""
) -> Returned:
    """The result of `function`, computed by a forked child.

    If this process has other threads, it runs here without limits: a lock that one of them holds
    would stay locked in the child forever. The `shakedown` command has none.

    Raises:
        UsageError: the limits were too low; `hint` is the remedy.
        Exception: what the function raised, with the child's traceback as a note.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        return function()
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        _serve(function, limits, sender)
    try:
        os.close(sender)
        with os.fdopen(receiver, "rb") as stream:
            answer = stream.read()
    except BaseException:
        _kill(child)
        raise
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise UsageError(_reason(os.waitstatus_to_exitcode(status), limits), hint=hint)
    result, error = pickle.loads(answer)  # noqa: S301  # our own child's, never an input
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _kill(child: int) -> None:
    """End the child, without waiting for one that is stuck in a kernel call."""
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + _REAPED_WITHIN
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.005)


def _reason(code: int, limits: CallLimits) -> str:
    if code == _OUT_OF_MEMORY:
        return f"needs more than {limits.memory / 1e6:.0f} MB of memory: not judged"
    if code == -signal.SIGXCPU:
        return f"needs more than {limits.seconds} s of CPU time: not judged"
    ended = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"the process that read the inputs was ended by {ended}: not judged"


def _serve(function: Callable[[], Any], limits: CallLimits, sender: int) -> NoReturn:
    """In the child: answer, and exit without the caller's exit actions (buffers, hooks)."""
    code = 1
    try:
        # A terminal sends Ctrl-C to both: the caller handles it and ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_with_reader(sender)
        _bound(limits)
        answer = _answer(function)
        fcntl.fcntl(sender, fcntl.F_SETFL, 0)  # from here on a read would also send SIGIO
        with os.fdopen(sender, "wb") as stream:
            stream.write(answer)
        code = 0
    except MemoryError:
        code = _OUT_OF_MEMORY
    finally:
        os._exit(code)


def _answer(function: Callable[[], Any]) -> bytes:
    """The pickled pair of result and exception."""
    try:
        return pickle.dumps((function(), None))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # the caller raises it again
        error.add_note(f"in a separate process:\n{traceback.format_exc()}")
        return pickle.dumps((None, error))


def _end_with_reader(pipe: int) -> None:
    """Have SIGIO end this process once nobody reads `pipe`, as its caller was killed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)


def _bound(limits: CallLimits) -> None:
    with open("/proc/self/statm", encoding="ascii") as stream:
        pages = int(stream.read().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory)
    _lower(resource.RLIMIT_CPU, limits.seconds)
    _lower(resource.RLIMIT_CORE, 0)  # SIGXCPU would leave a core dump


def _lower(what: int, value: int) -> None:
    """Set a limit, unless the caller is bound to a lower one."""
    soft, hard = resource.getrlimit(what)
    if soft == resource.RLIM_INFINITY or value < soft:
        resource.setrlimit(what, (value, hard))
