"""A call in a process of its own: its answer, its limits, and how it ends with its caller."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# A program of its own: where other threads run (pytest-xdist) the call is made in the process.
HEAD = """
import os, signal, sys, time
from shakedown.core.errors import ShakedownError, UsageError
from shakedown.core.isolated import CallLimits, run_isolated

def run(function, seconds=30, memory=10**8):
    try:
        print(run_isolated(function, CallLimits(seconds, memory), hint="try less"), flush=True)
    except ShakedownError as error:
        print(type(error).__name__, error, flush=True)
"""


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_answer_and_errors_of_the_function_are_those_of_the_call() -> None:
    assert _run("run(lambda: [os.getpid() != os.getppid(), 'x' * 10**6][0])") == "True"
    code = "def refuse(): raise UsageError('no such path', hint='look')\nrun(refuse)"
    assert _run(code) == "UsageError no such path\n  next: look"
    code = "print(run_isolated(os.getpid, CallLimits(9, 10**8)) == os.getpid())"
    assert _run(code) == "False"


def test_unforeseen_error_brings_the_traceback_of_its_process() -> None:
    code = """
def fail():
    return 1 / 0
try:
    run(fail)
except ZeroDivisionError as error:
    print("in fail" in error.__notes__[0])
"""
    assert _run(code) == "True"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("run(lambda: 9 ** 9 ** 9, seconds=1)", "needs more than 1 s of CPU time"),
        ("run(lambda: bytearray(2 * 10**8))", "needs more than 100 MB of memory"),
        ("run(lambda: os.kill(os.getpid(), signal.SIGSEGV))", "ended by signal 11"),
        ("run(lambda: os._exit(7))", "ended by exit status 7"),
    ],
)
def test_call_that_breaks_its_limits_is_an_error_with_a_sentence(code: str, said: str) -> None:
    answer = _run(code)
    assert answer.startswith("UsageError ")
    assert said in answer
    assert answer.endswith("next: try less")


def test_call_is_made_in_a_process_that_has_other_threads() -> None:
    code = """
import threading
threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
print(run_isolated(os.getpid, CallLimits(9, 10**8)) == os.getpid())
"""
    assert _run(code) == "True"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_child_is_gone_once_its_caller_was_ended(tmp_path: Path, signum: int) -> None:
    code = f"""
def long():
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()) + " ")
    9 ** 9 ** 9  # one call into C, in which no handler of Python runs
run(long)
"""
    process = subprocess.Popen([sys.executable, "-c", HEAD + code], stderr=subprocess.DEVNULL)
    child = _written(tmp_path / "pid")
    process.send_signal(signum)
    process.wait()
    _until(lambda: _ended(child))

    assert _ended(child)


def _written(path: Path) -> int:
    _until(lambda: path.exists() and path.read_text().endswith(" "))
    return int(path.read_text())


def _ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()  # its new parent may never ask
    except OSError:
        return True


def _until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
