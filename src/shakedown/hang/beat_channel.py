"""The way of a component's beats to its heartbeat file, which never blocks the component.

A beat is a few numbers in memory that a small process of its own shares and looks at
(beat_writer.py). It needs no GIL of ours, and what is in the memory outlives us: the last beat
reaches the file also when the next instruction holds the interpreter for minutes, stops the
process or ends it. Only the newest beat counts, so nothing queues up.
"""

import contextlib
import math
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
    BEAT,
    FAILURES,
    IDENTITY,
    IN_FILE_SYSTEM,
    MEMORY_BYTES,
    NAME,
    SLOTS,
    WRITER,
    newest,
    settled,
)

CLOSE_SECONDS = 5.0
CHECK_SECONDS = 10.0  # between two looks whether the writer lives; one that was killed is replaced
_PROGRAM = Path(beat_writer.__file__).absolute()
_MEMORY = re.compile(rf"/memfd:{NAME}(?: \(deleted\))?")


class Channel:
    """Starts the writer with the first beat. For one thread of the process that made it.

    `identity` is who beats, as members of a JSON object. `failures` counts beats that could not be
    written at the first try, and lost writers.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._path, self._identity = path.absolute(), identity
        self._owner = os.getpid()
        self._descriptor = self._pipe = -1
        self._memory: mmap.mmap | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        self._next_check = 0.0
        self._failures = self._count = 0
        _channels.add(self)

    @property
    def failures(self) -> int:
        """Ours and the writer's own."""
        if self._memory is None:
            return self._failures
        return self._failures + int.from_bytes(self._memory[FAILURES : FAILURES + 8], "little")

    def put(self, phase: bytes, *counts: int) -> None:
        """Note a beat; nothing is raised, and a forked child does nothing.

        Args:
            counts: `beat_writer.COUNTS`.
        """
        moment = time.monotonic()
        if moment >= self._next_check:
            self._check(moment)
        if self._memory is not None:
            self._count = count = self._count + 1
            slot = SLOTS[count & 1]
            BEAT.pack_into(self._memory, slot, count, phase, *counts, time.time(), moment, count)

    def close(self) -> None:
        """Let the writer write the last beat and end, 5 s long; one that stands is left."""
        if os.getpid() != self._owner or self._pipe < 0:
            return
        writer = self._hang_up()
        self._next_check = 0.0
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
        self._memory, self._next_check = None, math.inf

    def _check(self, now: float) -> None:
        """Make the memory and a writer where there is none; it finds the beat in the memory."""
        self._next_check = now + CHECK_SECONDS
        try:
            if self._memory is None:
                self._memory = self._share()
            if self._pipe >= 0:
                os.write(self._pipe, b"\n")
        except BlockingIOError:
            return  # the pipe is full for a writer that stands
        except BrokenPipeError:  # it was killed
            self._failures += 1
            self._hang_up()
        except OSError:
            self._failures += 1
            return
        if self._pipe < 0:
            self._try_to_start()

    def _try_to_start(self) -> None:
        try:
            self._start()
        except OSError:
            self._failures += 1

    def _share(self) -> mmap.mmap:
        descriptor = os.memfd_create(NAME)
        try:
            os.ftruncate(descriptor, MEMORY_BYTES)
            memory = mmap.mmap(descriptor, MEMORY_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        memory[IDENTITY : IDENTITY + len(self._identity)] = self._identity
        self._descriptor = descriptor
        return memory

    def _start(self) -> None:
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
    """A living component's newest beat as a record, and how its writer is doing.

    `in_file_system`: the writer is inside a call of the file system. `failures`: its own.
    """

    record: bytes
    writer: int
    in_file_system: bool
    failures: int


def read_memory(pid: int) -> Memory | None:
    """The memory of a process of this host, read without its help; None where it has none, or
    one that is not ours.

    It is as new as the process itself, whatever the file system does.
    """
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            if _MEMORY.fullmatch(_link(f"{folder}/{name}")):
                return _read(f"{folder}/{name}")
    except (OSError, ValueError):
        return None
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115  # of every open file: a Path costs more
    except OSError:
        return ""


def _read(path: str) -> Memory | None:
    with open(path, "rb", buffering=0) as stream:
        memory = settled(lambda: os.pread(stream.fileno(), MEMORY_BYTES, 0))
    if len(memory) < MEMORY_BYTES:
        return None
    return Memory(
        record=newest(memory),
        writer=int.from_bytes(memory[WRITER : WRITER + 4], "little"),
        in_file_system=memory[IN_FILE_SYSTEM] == 1,
        failures=int.from_bytes(memory[FAILURES : FAILURES + 8], "little"),
    )
