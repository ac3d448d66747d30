"""What /proc says about a process: state, kernel wait channel, threads, caught signals."""

import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_THREADS = 64


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_state(pid: int) -> ProcState:
    """Read the state; a process that is gone, or goes meanwhile, has state X."""
    root = Path("/proc") / str(pid)
    state = _state(root)
    if state is None:
        return ProcState("X")
    threads = []
    for folder in _tasks(root)[:MAX_THREADS]:
        thread_state = _state(folder)
        if thread_state is not None:
            name = _read(folder / "comm")
            threads.append(ThreadState(int(folder.name), name, thread_state, _wchan(folder)))
    return ProcState(state, _wchan(root), tuple(threads))


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for a signal; without one SIGUSR1 would end it."""
    for line in _read(Path("/proc") / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _tasks(root: Path) -> list[Path]:
    try:
        return sorted((root / "task").iterdir(), key=lambda p: int(p.name))
    except OSError:
        return []


def _state(root: Path) -> str | None:
    # the command in brackets may hold anything: the state follows the last bracket
    _, _, rest = _read(root / "stat").rpartition(") ")
    return rest[:1] or None


def _wchan(root: Path) -> str:
    wchan = _read(root / "wchan")
    return "" if wchan == "0" else wchan


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\n")
    except OSError:
        return ""
