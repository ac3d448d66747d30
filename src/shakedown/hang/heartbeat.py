"""A step counter per component: one small file each, overwritten in place by one write.

The write is another process's (beat_channel.py): the component itself never waits for a disk.

Stacks do not show that two ranks count different batches; these records do.
"""

import json
import os
import re
import socket
import time
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shakedown.hang import beat_writer
from shakedown.hang.beat_channel import Channel, read_memory

Phase = Literal[
    "init",
    "compile",
    "data",
    "rollout_wait",
    "train",
    "weight_sync",
    "checkpoint",
    "eval",
    "finished",
]
PHASES: tuple[str, ...] = get_args(Phase)

RECORD_BYTES = beat_writer.RECORD_BYTES
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SUFFIX = ".beat"
_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Beat:
    """The last record of one component.

    `count` numbers the beats from 1; `wall` is Unix time and `monotonic` the host's monotonic
    clock, both in seconds; `batch_size` counts sequences of the current micro-batch.
    """

    role: str
    rank: int
    pid: int
    host: str
    phase: str
    step: int
    micro_batch: int
    batch_size: int
    count: int
    wall: float
    monotonic: float

    @property
    def name(self) -> str:
        """`trainer-rank0`: the component's name in logs and evidence."""
        return f"{self.role}-rank{self.rank}"


class Heartbeat:
    """Writes `folder/<role>-rank<rank>.beat`. Call `beat` from the component's main loop.

    A beat is a copy into memory and a byte into a pipe; a process of its own writes the file. A
    file system that blocks or fails never stops the training: failures are counted in `failures`
    and tried again. In a forked child a beat does nothing.

    Raises:
        ValueError: `role` is not a plain file name.
    """

    def __init__(self, folder: Path, rank: int, role: str = "trainer") -> None:
        if not _NAME.fullmatch(role):
            raise ValueError(f"role {role!r}: expected letters, digits, '_', '.', '-'")
        self.path = folder / f"{role}-rank{rank}{_SUFFIX}"
        self._role, self._rank = role, rank
        self._host, self._count = socket.gethostname()[:64], 0
        self._channel = Channel(self.path)
        weakref.finalize(self, self._channel.release)

    @property
    def failures(self) -> int:
        """Tries at writing the file that failed so far."""
        return self._channel.failures

    def beat(
        self, *, phase: Phase, step: int = 0, micro_batch: int = 0, batch_size: int = 0
    ) -> None:
        """Record that the component is alive in `phase` at `step`."""
        self._count += 1
        record = Beat(
            role=self._role,
            rank=self._rank,
            pid=os.getpid(),
            host=self._host,
            phase=phase,
            step=int(step),
            micro_batch=int(micro_batch),
            batch_size=int(batch_size),
            count=self._count,
            wall=round(time.time(), 3),
            monotonic=round(time.monotonic(), 3),
        )
        self._channel.put(encode(record))

    def close(self) -> None:
        """Write the last record within 5 s; a file system that blocks longer is left to itself."""
        self._channel.close()


def encode(beat: Beat) -> bytes:
    """The fixed-size record: CRC-32 in hex, a space, JSON, padding, newline."""
    body = _to_json(vars(beat)).encode()
    if len(body) + 10 > RECORD_BYTES:
        raise ValueError(f"heartbeat record of {len(body)} bytes does not fit")
    padded = body.ljust(RECORD_BYTES - 10)
    return b"%08x " % zlib.crc32(padded) + padded + b"\n"


def decode(record: bytes) -> Beat | None:
    """A record's beat, or None when it is torn, corrupt or not a heartbeat."""
    if len(record) < RECORD_BYTES:
        return None
    checksum, padded = record[:8], record[9 : RECORD_BYTES - 1]
    if b"%08x" % zlib.crc32(padded) != checksum.lower():
        return None
    try:
        return beat_from(json.loads(padded))
    except ValueError:
        return None


def beat_from(body: Any) -> Beat | None:
    """A beat from its JSON form, or None when a key is missing or has another type."""
    if not isinstance(body, Mapping):
        return None
    values: dict[str, Any] = {}
    for key, declared in Beat.__annotations__.items():
        value = body.get(key)
        if declared is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not declared:
            return None
        values[key] = value
    return Beat(**values)


def read_heartbeats(folder: Path) -> list[Beat]:
    """The readable beats of `folder`, by role and rank; torn and foreign files are left out."""
    beats = []
    try:
        paths = sorted(folder.glob(f"*{_SUFFIX}"))
    except OSError:
        return []
    for path in paths:
        beat = _read(path) or _read(path)  # a torn record is whole at the second look
        if beat is not None:
            beats.append(beat)
    return sorted(beats, key=lambda beat: (beat.role, beat.rank))


@dataclass(frozen=True)
class LiveBeat:
    """A living component's newest beat, from its memory, and its writer: see `Memory`."""

    beat: Beat
    writer: int
    in_file_system: bool
    failures: int


def read_live(pid: int) -> LiveBeat | None:
    """The newest beat of a process of this host, None where it has none or may not be read."""
    memory = read_memory(pid)
    beat = decode(memory.record) if memory is not None else None
    if memory is None or beat is None:
        return None
    return LiveBeat(beat, memory.writer, memory.in_file_system, memory.failures)


def _read(path: Path) -> Beat | None:
    try:
        with path.open("rb") as stream:
            return decode(stream.read(RECORD_BYTES))
    except OSError:
        return None
