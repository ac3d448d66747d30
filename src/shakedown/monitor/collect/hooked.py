"""Processes that loaded our hook write their stacks and Flight Recorder themselves.

The hook's own open file shows that it is loaded, where it writes and which rank it is; a process
without it is never signalled: SIGUSR1 may mean anything to another program.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.errors import StorageError
from shakedown.core.paths import EvidencePaths
from shakedown.monitor.collect import inside, proc
from shakedown.processes.guard import look, send_one

STACK_SECONDS = 2.0  # the handler runs in microseconds, once the process gets a CPU
HOOK_SECONDS = 20.0  # half a second of polling, then every rank may import torch._inductor
MAX_STACK_BYTES = 4 * 2**20
LAST_SECONDS = 5.0  # for the others, once half of them have answered
_POLL_SECONDS = 0.01
_FILE = re.compile(r"faulthandler-(([A-Za-z0-9_.-]{1,64}?)-rank(\d{1,7}))\.txt")
# Threads come newest first, so a whole dump ends with the main thread's outermost frame. At 100
# frames or threads faulthandler stops with dots, and the outermost frames are missing.
_WHOLE = re.compile(rb" in (?:<module>|_run_module_as_main)\n*\Z")
_CUT = re.compile(rb"^ *\.\.\.$", re.MULTILINE)


@dataclass(frozen=True)
class Hook:
    """A process's hook: its component's name, role and rank, and where it writes.

    `started` (clock ticks since boot) tells the process from a later one of its number.
    """

    pid: int
    started: int
    name: str
    role: str
    rank: int
    evidence: Path
    stream: Path  # by the process's descriptor, so that it is the same file in any mount namespace
    recorder: bool


def find(pid: int) -> Hook | None:
    """The hook of a process, or None. A forked child has its parent's file, and no own hook."""
    folder = f"/proc/{pid}/fd"
    process = look(pid)  # before its files: they are this process's or, later, nobody's
    try:
        numbers = os.listdir(folder)
    except OSError:
        return None
    if process is None:
        return None
    for number in numbers:
        target = proc.link(f"{folder}/{number}")
        match = _FILE.fullmatch(target.rpartition("/")[2])
        if match is None:
            continue
        if proc.link(f"/proc/{proc.parent(pid)}/fd/{number}") == target:  # numbers survive a fork
            return None
        recorder = _has_recorder(pid)
        stream = Path(folder) / number
        name, role, rank = match.groups()
        evidence = inside.folder_of(pid, Path(target), stream)
        return Hook(pid, process.started, name, role, int(rank), evidence, stream, recorder)
    return None


def find_by_file(pid: int, name: str, evidence: Path) -> Hook | None:
    """As `find`, for a process whose open files we may not see: by the file that its hook made.

    The process may still have got its id from the system after the hook's own process ended, so
    its handler of SIGUSR1 is looked at before it is signalled. A file that another user made says
    nothing about it: anybody who may write into the folder could have it signalled so.
    """
    process = look(pid)
    path = EvidencePaths(evidence).stacks(name)
    match = _FILE.fullmatch(path.name)
    if process is None or match is None or proc.visible(pid) or not path.is_file():
        return None
    if path.stat().st_uid != proc.owner(pid):
        return None
    recorder = _has_recorder(pid)
    role, rank = match[2], int(match[3])
    return Hook(pid, process.started, name, role, rank, evidence, path, recorder)


def _has_recorder(pid: int) -> bool:
    from shakedown.monitor import hook  # loads ctypes and logging: not where no process has one

    return proc.has_thread(pid, hook.THREAD_NAME)


class Stacks:
    """Asks hooked processes for their stacks, several rounds long."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks
        self._first: dict[int, int] = {}

    def dump(self, pids: Sequence[int]) -> tuple[dict[int, bytes], dict[int, str]]:
        """Signal those of `pids` that are hooked: ({pid: dump}, {pid: why there is none})."""
        asked: dict[int, tuple[Hook, int]] = {}
        lost: dict[int, str] = {}
        for found in self._hooks:
            if found.pid in pids:
                try:
                    asked[found.pid] = found, _ask(found)
                except OSError as error:
                    lost[found.pid] = f"faulthandler: {error.strerror or error}"
        # The file's size before the first signal; 0: every byte in it is copied here.
        for pid, (_, offset) in asked.items():
            self._first.setdefault(pid, offset)
        return _wait(asked), lost

    def clear(self, out: Path) -> None:
        """Empty the files below `out` that were copied completely: read twice, they would count as
        further moments."""
        for found in self._hooks:
            with contextlib.suppress(OSError):
                if self._first.get(found.pid) == 0 and found.evidence.samefile(out):
                    os.truncate(found.stream, 0)


def _ask(found: Hook) -> int:
    """Signal the process; returns the size of its file before."""
    if not proc.catches(found.pid, signal.SIGUSR1):
        raise OSError("SIGUSR1 is not caught, it would end the process")
    offset = found.stream.stat().st_size
    send_one(found.pid, found.started, signal.SIGUSR1)
    return offset


def _wait(asked: Mapping[int, tuple[Hook, int]]) -> dict[int, bytes]:
    """The whole dumps that came in time."""
    dumps: dict[int, bytes] = {}
    deadline = time.monotonic() + STACK_SECONDS
    while len(dumps) < len(asked):
        for pid, (found, offset) in asked.items():
            if pid not in dumps and (text := _dump_after(found.stream, offset)):
                dumps[pid] = text
        if len(dumps) == len(asked) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return {pid: text for pid, text in dumps.items() if not _CUT.search(text)}


def _dump_after(stream: Path, offset: int) -> bytes:
    """The dump that was written after `offset`; empty unless it is a whole one."""
    try:
        if stream.stat().st_size <= offset:
            return b""
        with stream.open("rb") as file:
            file.seek(offset)
            text = file.read(MAX_STACK_BYTES)
    except OSError:
        return b""
    # Dots at the end, too, mean that nothing more comes; `_wait` leaves such a dump to py-spy.
    whole = _WHOLE.search(text) or text.endswith(b"...\n")
    return text if whole else b""


def request_recorders(hooks: Sequence[Hook]) -> tuple[float, list[str]]:
    """Ask for Flight Recorder dumps: (when, what could not be asked)."""
    asked, missed = time.time(), []
    for evidence in _distinct({h.evidence for h in hooks if h.recorder}):
        from shakedown.monitor import hook  # see `_has_recorder`

        try:
            hook.request(evidence)
        except StorageError as error:
            missed.append(f"flight recorder: {str(error).partition(chr(10))[0]}")
    return asked, missed


def _distinct(folders: set[Path]) -> list[Path]:
    """The folders, each once: ranks of a container have the same one under several paths."""
    found: list[Path] = []
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            if any(folder.samefile(other) for other in found):
                continue
        found.append(folder)
    return found


def await_recorders(hooks: Sequence[Hook], asked: float) -> list[Hook]:
    """Wait for the dumps; returns those that did not answer.

    A locked interpreter never does, and a stopped process is not waited for.
    """
    deadline = time.monotonic() + HOOK_SECONDS
    able = [h for h in hooks if h.recorder]
    waiting, half = able, False
    while waiting and time.monotonic() < deadline:
        waiting = [h for h in waiting if not _answered(h, asked) and proc.read_state(h.pid).alive]
        if not half and 0 < 2 * len(waiting) <= len(able):
            half, deadline = True, min(deadline, time.monotonic() + LAST_SECONDS)
        if not any(proc.read_state(h.pid).pausable for h in waiting):
            break
        time.sleep(0.1)
    return [h for h in waiting if not _answered(h, asked)]


def _answered(found: Hook, asked: float) -> bool:
    try:
        status = EvidencePaths(found.evidence).flight_recorder(found.name, "pickle").stat()
    except OSError:
        return False
    # A second of allowance: a file's time is by the file server's clock.
    return status.st_mtime >= asked - 1.0


def recorder_dumps(found: Hook, asked: float) -> Iterator[tuple[str, bytes]]:
    """The dumps that the process wrote since `asked`, by file name."""
    for suffix in ("json", "pickle"):
        path = EvidencePaths(found.evidence).flight_recorder(found.name, suffix)
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= asked - 1.0:
                yield path.name, path.read_bytes()
