"""Facts of a process in /proc: state, kernel wait channel, threads, caught signals."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shakedown.processes.guard import look, look_into
from shakedown.progress.signs import Activity

MAX_THREADS = 64
# States of a process that does not run: X is gone, Z has ended; T and t are stopped.
_ENDED, _STOPPED = "XZ", "Tt"
_LAUNCH = re.compile(
    r"^(?:\S*python\S* (?:-\w+ )*)?(?:\S*/)?(?:torchrun|accelerate launch|deepspeed)(?: |$)"
    r"|-m (?:torch\.distributed\.(?:run|launch)|accelerate\.commands|deepspeed\.launcher)"
)
# `python3.11`, and `python3 (deleted)` once an upgrade has replaced the program.
_PYTHON = re.compile(r"(?:python|pypy)[\w.-]*(?: \(deleted\))?")


@dataclass(frozen=True)
class ThreadState:
    """One kernel thread."""

    tid: int
    name: str
    state: str
    wchan: str


@dataclass(frozen=True)
class ProcState:
    """A process at one moment. `state` X means that it is gone."""

    state: str
    wchan: str = ""
    threads: tuple[ThreadState, ...] = ()
    activity: Activity | None = None

    @property
    def alive(self) -> bool:
        return self.state not in _ENDED

    @property
    def pausable(self) -> bool:
        """Neither stopped already nor held by the kernel: waiting for its stop would last."""
        return self.alive and self.state not in _STOPPED and self.state != "D"

    def to_json(self) -> dict[str, Any]:
        threads = [vars(thread).copy() for thread in self.threads]
        done = vars(self.activity) if self.activity else {}
        return {"state": self.state, "wchan": self.wchan, "threads": threads, **done}


def read_state(pid: int, *, threads: bool = True) -> ProcState:
    """Read the state; a process that is gone, or goes meanwhile, has state X.

    `threads`: each of its threads, too, which takes two thirds of the time.
    """
    root = f"/proc/{pid}"
    state = _state(root)
    if state is None:
        return ProcState("X")
    found = []
    for folder in _tasks(root)[:MAX_THREADS] if threads else ():
        thread_state = _state(folder)
        if thread_state is not None:
            tid = int(folder.rpartition("/")[2])
            name = _read(f"{folder}/comm")
            found.append(ThreadState(tid, name, thread_state, _wchan(folder)))
    return ProcState(state, _wchan(root), tuple(found), _activity(pid))


def _activity(pid: int) -> Activity:
    tree = [pid, *_descendants(pid)]
    timed = sum(_wchan(f"/proc/{each}") in TIMERS for each in tree)
    return Activity(time.time(), sum(map(cpu, tree)), sum(map(_io, tree)), _output(pid), timed)


# Kernel functions of a sleep that ends by itself.
TIMERS = frozenset({"hrtimer_nanosleep", "do_nanosleep", "common_nsleep"})


def _descendants(pid: int) -> list[int]:
    """The descendants of a process, such as its data loader's workers; bounded in number."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < MAX_THREADS:
        below = sorted(children(left.pop()))
        found += below
        left += below
    return found


def cpu(pid: int) -> float:
    """Seconds of CPU time, its own; 0 once it is gone."""
    process = look(pid)
    return process.ticks / os.sysconf("SC_CLK_TCK") if process else 0.0


def began(pid: int) -> int:
    """When the process began, in clock ticks since the host did; 0 once it is gone."""
    process = look(pid)
    return process.started if process else 0


def _io(pid: int) -> int:
    rows = _read(f"/proc/{pid}/io").splitlines()
    return sum(int(r.split()[1]) for r in rows if r.startswith(("rchar:", "wchar:")))


def _output(pid: int) -> int:
    """How far its stdout and stderr were written. Not by their size: a dead file system blocks
    whoever asks for it.
    """
    texts = [_read(f"/proc/{pid}/fdinfo/{number}") for number in (1, 2)]
    rows = (row for text in texts for row in text.splitlines() if row.startswith("pos:"))
    return sum(int(row.split()[1]) for row in rows)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for a signal; without one SIGUSR1 would end it."""
    # A mask in hexadecimal: its bit N - 1 stands for signal N (proc(5)).
    return bool(int(status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def status(pid: int | str, name: str) -> str:
    """A field of /proc/PID/status; empty where there is none."""
    rows = (row.partition(":") for row in _read(f"/proc/{pid}/status").splitlines())
    return next((value.strip() for key, _, value in rows if key == name), "")


def all_pids() -> list[int]:
    """Every process of this process-id namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def owner(pid: int) -> int | None:
    """The user id, None when the process is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116  # of every process: see `link`
    except OSError:
        return None


def command(pid: int) -> str:
    """The command line, empty for a zombie or a process that is gone."""
    return _read(f"/proc/{pid}/cmdline").rstrip("\0").replace("\0", " ")


def is_launch(command: str) -> bool:
    """Whether a command line is that of a launcher, which runs no rank itself."""
    return _LAUNCH.search(command) is not None


def parent(pid: int) -> int:
    """The parent's id, 0 when there is none or the process is gone."""
    process = look(pid)
    return process.parent if process else 0


def children(pid: int) -> set[int]:
    """Direct children of all threads; empty where the kernel does not list them."""
    tasks = _tasks(f"/proc/{pid}")
    return {int(child) for task in tasks for child in _read(f"{task}/children").split()}


def uses_cuda(pid: int) -> bool:
    """Whether it has loaded the driver's library; torch does so with the first call on a GPU."""
    try:
        return b"/libcuda.so" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def has_thread(pid: int, name: str) -> bool:
    """Whether a kernel thread of the process bears this name."""
    return any(_read(f"{task}/comm") == name for task in _tasks(f"/proc/{pid}"))


def visible(pid: int) -> bool:
    """Whether we may read the process's links and memory: its user and its capabilities."""
    return link(f"/proc/{pid}/exe") != ""


def is_python(pid: int) -> bool:
    """Whether it runs Python, by the name of its program, which a process cannot rename."""
    program = link(f"/proc/{pid}/exe")
    return _PYTHON.fullmatch(program.rpartition("/")[2]) is not None


def link(path: str) -> str:
    """The target of a link, empty when it cannot be read."""
    try:
        return os.readlink(path)  # noqa: PTH115  # thousands of them: a Path costs more than the call
    except OSError:
        return ""


def _tasks(root: str) -> list[str]:
    try:
        return [f"{root}/task/{tid}" for tid in sorted(map(int, os.listdir(f"{root}/task")))]
    except OSError:
        return []


def _state(root: str) -> str | None:
    process = look_into(root)
    return process.state if process else None


def _wchan(root: str) -> str:
    wchan = _read(f"{root}/wchan")
    # The kernel writes 0 for a running process, and for readers without permission.
    return "" if wchan == "0" else wchan


def _read(path: str) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # thousands: a file object costs as much
    except OSError:
        return ""
    try:
        return os.read(file, 65536).decode("utf-8", "replace").strip("\n")
    except OSError:
        return ""
    finally:
        os.close(file)
