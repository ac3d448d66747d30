"""The way of a component's records to its heartbeat file, which never blocks the component.

A record is copied into memory that a small process of its own shares (beat_writer.py), and one
byte into a pipe wakes that process. It needs no GIL of ours, and what is in the memory outlives
us: the last record reaches the file also when the next instruction holds the interpreter for
minutes, stops the process or ends it. Only the newest record counts, so nothing queues up.
"""

import contextlib
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from shakedown.hang import beat_writer
from shakedown.hang.beat_writer import (
    FAILURES,
    IN_FILE_SYSTEM,
    MEMORY_BYTES,
    NAME,
    NEWEST,
    RECORD_BYTES,
    WRITER,
    newest,
)

CLOSE_SECONDS = 5.0
RESTART_SECONDS = 10.0  # a writer that was killed is started again, at most this often
_PROGRAM = Path(beat_writer.__file__).absolute()
_MEMORY = re.compile(rf"/memfd:{NAME}(?: \(deleted\))?")


class Channel:
    """Starts the writer with the first record. For one thread of the process that made it.

    `failures` counts records that could not be written at the first try, and lost writers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._owner = os.getpid()
        self._descriptor = self._pipe = -1
        self._memory: mmap.mmap | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0
        self._failures = 0
        _channels.add(self)

    @property
    def failures(self) -> int:
        """Ours and the writer's own."""
        if self._memory is None:
            return self._failures
        return self._failures + int.from_bytes(self._memory[FAILURES : FAILURES + 8], "little")

    def put(self, record: bytes) -> None:
        """Hand a record over; nothing is raised, and a forked child does nothing."""
        if os.getpid() != self._owner:
            return
        try:
            memory = self._memory or self._share()
            slot = 1 - memory[NEWEST]
            memory[RECORD_BYTES * (1 + slot) : RECORD_BYTES * (2 + slot)] = record
            memory[NEWEST] = slot
            if self._pipe < 0 and not self._start():
                return
            os.write(self._pipe, b"\n")
        except BlockingIOError:
            return  # the pipe is full for a writer that stands: it looks again once it can
        except BrokenPipeError:  # it was killed
            self._failures += 1
            self._hang_up()
        except OSError:
            self._failures += 1

    def close(self) -> None:
        """Let the writer write the last record and end, 5 s long; one that stands is left."""
        if os.getpid() != self._owner or self._pipe < 0:
            return
        writer = self._hang_up()
        self._next_start = 0.0
        try:
            if writer is not None:
                writer.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._failures += 1

    def release(self) -> None:
        """Close, and give the memory back."""
        self.close()
        if os.getpid() == self._owner and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._memory = -1, None

    def disown(self) -> None:
        """In a forked child: hold nothing open that tells the writer that the rank lives."""
        for descriptor in (self._pipe, self._descriptor):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._pipe = self._descriptor = -1

    def _share(self) -> mmap.mmap:
        descriptor = os.memfd_create(NAME)
        try:
            os.ftruncate(descriptor, MEMORY_BYTES)
            memory = mmap.mmap(descriptor, MEMORY_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._memory = descriptor, memory
        return memory

    def _start(self) -> bool:
        """Start a writer where it is time to; the record waits for it in the memory."""
        now = time.monotonic()
        if now < self._next_start:
            return False
        self._next_start = now + RESTART_SECONDS
        _ending[:] = [writer for writer in _ending if writer.poll() is None]
        reader, pipe = os.pipe()
        try:
            os.set_blocking(pipe, False)
            self._writer = self._spawn(reader)
        except BaseException:
            os.close(pipe)
            raise
        finally:
            os.close(reader)
        self._pipe = pipe
        return True

    def _spawn(self, reader: int) -> "subprocess.Popen[bytes]":
        """With all signals blocked, from its first instruction on: Slurm and a supervisor send
        theirs to everyone, and the rank may still have things to do then."""
        command = [sys.executable, "-I", "-S", os.fspath(_PROGRAM), os.fspath(self._path)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            return subprocess.Popen(
                [*command, str(self._descriptor)],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._descriptor],
                cwd="/",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _hang_up(self) -> "subprocess.Popen[bytes] | None":
        """The writer, which ends by itself; its end is noted when it is looked for again."""
        pipe, self._pipe = self._pipe, -1
        os.close(pipe)
        writer, self._writer = self._writer, None
        _ending.extend([writer] if writer else [])
        return writer


_ending: "list[subprocess.Popen[bytes]]" = []
_channels: "weakref.WeakSet[Channel]" = weakref.WeakSet()


def _disown_all() -> None:
    for channel in list(_channels):
        channel.disown()


os.register_at_fork(after_in_child=_disown_all)


@dataclass(frozen=True)
class Memory:
    """A living component's newest record, and how its writer is doing.

    `in_file_system`: the writer is inside a call of the file system. `failures`: its own.
    """

    record: bytes
    writer: int
    in_file_system: bool
    failures: int


def read_memory(pid: int) -> Memory | None:
    """The memory of a process of this host, read without its help; None where it has none.

    It is as new as the process itself, whatever the file system does.
    """
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if _MEMORY.fullmatch(_link(f"{folder}/{name}")):
                return _read(f"{folder}/{name}")
    except OSError:
        return None
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115  # of every open file: a Path costs more
    except OSError:
        return ""


def _read(path: str) -> Memory | None:
    with open(path, "rb", buffering=0) as stream:
        memory = stream.read(MEMORY_BYTES) or b""
    if len(memory) < MEMORY_BYTES:
        return None
    return Memory(
        record=newest(memory),
        writer=int.from_bytes(memory[WRITER : WRITER + 4], "little"),
        in_file_system=memory[IN_FILE_SYSTEM] == 1,
        failures=int.from_bytes(memory[FAILURES : FAILURES + 8], "little"),
    )
