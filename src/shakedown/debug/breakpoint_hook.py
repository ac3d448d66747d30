"""In each process of a debugged stage: breakpoint() and exceptions pause it for a debugger.

Before it pauses, nothing listens and no debugger is loaded. Then the gateway listens and the pause
is recorded in a file; debugpy is loaded when a debugger with the token attaches. The process
resumes when that debugger says so, or when the file `<node>-<pid>.continue` appears.
"""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from shakedown.core.errors import ShakedownError
from shakedown.debug.break_at import patch_imports
from shakedown.debug.debug_gateway import DebugGateway, Standing
from shakedown.debug.debug_settings import FOLDER, ROLE, places
from shakedown.debug.paused_processes import (
    TOUCH_SECONDS,
    PausedProcess,
    PauseFile,
    Reason,
    describe,
)
from shakedown.slurm.hostlist import node_name

_POLL_SECONDS = 0.3
_UNTRACED = "pydev_do_not_trace"  # debugpy's own mark for threads that it leaves alone


def install() -> None:
    """Called when Python starts, by `startup_hook.py`."""
    sys.breakpointhook = stop_here
    sys.excepthook = _then(sys.excepthook)
    threading.excepthook = _then_in_thread(threading.excepthook)
    os.register_at_fork(after_in_child=_forget)
    try:
        found = places()
    except ShakedownError as error:
        print(f"shakedown: {error}", file=sys.stderr)
    else:
        if found:
            patch_imports(found)


def stop_here(*, line: int = 0, **_given: object) -> None:
    """The breakpoint() hook. `line`: that of the next statement, if the call was inserted."""
    frame = sys._getframe(1)
    where = _Where(frame.f_code.co_filename, line or frame.f_lineno, frame.f_code.co_name)
    _process().stop(where, "breakpoint", "", lambda: _suspend_at(frame))


def stop_at(error: BaseException) -> None:
    """Stop where an exception was raised, once for each."""
    process, last = _process(), error.__traceback__
    if process.raised is error or not isinstance(error, Exception) or last is None:
        return
    process.raised = error
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    where = _Where(code.co_filename, last.tb_lineno, code.co_name)
    detail = f"{type(error).__name__}: {error}"[:200]
    process.stop(where, "exception", detail, lambda: _suspend_post_mortem(error))


@dataclass(frozen=True)
class _Where:
    file: str
    line: int
    function: str


class _ThisProcess:
    """This process, as debuggers see it: at most one file, one gateway and one debugger."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._folder, self._node = Path(os.environ[FOLDER]), node_name()
        self._file = PauseFile(self._folder, self._node, os.getpid())
        self._token = secrets.token_hex(32)
        self._guard = DebugGateway(self._token, self._changed)
        self._turn = threading.RLock()  # one thread waits at a time; one may break while it does
        self._change = threading.Lock()
        self._waits: PausedProcess | None = None  # for a debugger
        threading.Thread(target=self._look, name="shakedown-stop", daemon=True).start()

    def stop(self, where: _Where, reason: Reason, detail: str, suspend: Callable[[], None]) -> None:
        """Wait until a debugger has attached, then stop in it by `suspend`."""
        with self._turn:
            if not self._guard.ready and not self._stand(where, reason, detail):
                return
        with self._change:  # the file stays until the debugger reports the position
            self._waits = None
        suspend()

    def _stand(self, where: _Where, reason: Reason, detail: str) -> bool:
        """Wait for a debugger; False if the process is to continue without one."""
        self._guard.expect()
        stop = self._described(where, reason, detail)
        with self._change:
            self._waits = stop
        try:
            self._file.write(stop)
            _say(f"stopped: {describe(stop)}")
            attached = self._guard.wait(_load)
        except (
            ShakedownError
        ) as error:  # a full disk must not end a process that is only being inspected
            _say(f"not stopped: {error}")
            attached = False
        if not attached:
            with self._change:
                self._waits = None
            self._guard.close()
            self._file.remove()
        return attached

    def _described(self, where: _Where, reason: Reason, detail: str) -> PausedProcess:
        rank = os.environ.get("RANK", "")
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        return PausedProcess(
            node=self._node,
            host=socket.gethostname(),
            pid=os.getpid(),
            role=os.environ.get(ROLE, "process"),
            rank=int(rank) if rank.isdecimal() else None,
            program=main.name if main is not None else (sys.argv or [""])[0],
            file=str(Path(where.file).absolute()),
            line=where.line,
            function=where.function,
            reason=reason,
            detail=detail,
            port=self._guard.open(),
            token=self._token,
            attached=self._guard.attached,
            since=round(time.time(), 3),
        )

    def _changed(self, standing: Standing | None) -> None:
        """Update the file when the debugger comes, goes, stops or resumes a thread."""
        with self._change:
            stop = self._waits
            if standing is not None:
                where = _Where(standing.file, standing.line, standing.function)
                stop = self._described(where, "debugger", standing.reason)
            if stop is None:
                self._file.remove()
                return
            try:
                self._file.write(replace(stop, attached=self._guard.attached))
            except ShakedownError as error:
                _say(str(error))

    def _look(self) -> None:
        """Keep the file fresh, and check for a request to resume."""
        setattr(threading.current_thread(), _UNTRACED, True)
        touched = 0.0
        while True:
            time.sleep(_POLL_SECONDS)
            if self._waits is None and not self._guard.stands:
                continue
            if time.monotonic() - touched > TOUCH_SECONDS:
                self._file.touch()
                touched = time.monotonic()
            if self._file.told_to_continue():
                self._guard.let_go()


_one: list[_ThisProcess] = []


def _process() -> _ThisProcess:
    if not _one:
        _one.append(_ThisProcess())
    return _one[0]


def _forget() -> None:
    """Reset the state in a forked child, which has none of its parent's threads."""
    _one.clear()


def _load(port: int, token: str) -> None:
    """Connect debugpy to the gateway, from the waiting thread."""
    # Nobody debugs modules frozen into Python, but debugpy warns about them.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy.server.api
        import pydevd
    except ImportError as error:
        _say(f"no debugger: {sys.executable}: {error}")
        return
    # As debugpy.connect() does, which would block here, so that nobody could resume the process.
    # Without patch_multiprocessing, or children would ask this gateway for their own debugger.
    debugpy.server.api.ensure_logging()
    hidden = (str(Path(debugpy.__file__).parent), str(Path(__file__).parent))
    try:
        pydevd.settrace(
            host="127.0.0.1",
            port=port,
            suspend=False,
            wait_for_ready_to_run=False,
            patch_multiprocessing=False,
            client_access_token=token,
            notify_stdin=False,
            dont_trace_start_patterns=hidden,
        )
    except OSError as error:  # the first debugger has gone again: wait for the next one
        _say(f"no debugger: {error}")
        return
    sys.breakpointhook = stop_here  # pydevd has put its own there


def _suspend_at(frame: FrameType) -> None:
    """Make the debugger stop at the next line of `frame`; debugpy.breakpoint() would stop in this
    module."""
    import pydevd

    pydevd.settrace(
        suspend=True, trace_only_current_thread=True, notify_stdin=False, stop_at_frame=frame
    )


def _suspend_post_mortem(error: BaseException) -> None:
    import debugpy  # noqa: T100

    debugpy.trigger_exception_handler(error, as_uncaught=False)


def _say(text: str) -> None:
    # Not sys.stderr, which torch and agents' workers replace.
    print(f"shakedown: {text}", file=sys.__stderr__, flush=True)


def _then(original: Callable[..., Any]) -> Callable[..., None]:
    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        stop_at(error)
        original(kind, error, trace)

    return excepthook


def _then_in_thread(original: Callable[..., Any]) -> Callable[..., None]:
    def excepthook(raised: Any) -> None:
        # A failing thread of our own must not wait for itself.
        if raised.exc_value is not None and not getattr(raised.thread, _UNTRACED, False):
            stop_at(raised.exc_value)
        original(raised)

    return excepthook
