"""A step counter per component: one small file each, overwritten in place by one write.

The write is another process's (beat_channel.py): the component itself never waits for a disk.

Stacks do not show that two ranks count different batches or run other shapes; these records do.
"""

import json
import os
import re
import socket
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
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

Extent = tuple[int, int, int]  # micro-batches, the most rows of one, the most tokens of a row
NO_EXTENT: Extent = (0, 0, 0)

RECORD_BYTES = beat_writer.RECORD_BYTES
_NAME, _NO_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}"), re.compile(r"[^A-Za-z0-9_.-]")
_SUFFIX = ".beat"
_PHASE_BYTES = {phase: phase.encode() for phase in PHASES}


@dataclass(frozen=True)
class Beat:
    """The last record of one component.

    `count` numbers the beats from 1; `wall` is Unix time and `monotonic` the host's monotonic
    clock, both in seconds; `batch_size` counts sequences of the current micro-batch.

    `given_*` is what this rank's data made for the step: how many micro-batches, the most rows of
    one, the most tokens of a row; `run_*` what its engine was called with; 0 for not known.
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
    given_count: int = 0
    given_rows: int = 0
    given_width: int = 0
    run_count: int = 0
    run_rows: int = 0
    run_width: int = 0

    @property
    def name(self) -> str:
        """`trainer-rank0`: the component's name in logs and evidence."""
        return f"{self.role}-rank{self.rank}"


class Heartbeat:
    """Writes `folder/<role>-rank<rank>.beat`. Call `beat` from the component's main loop.

    A beat is a few numbers put into memory; a process of its own writes the file. A file system
    that blocks or fails never stops the training: failures are counted in `failures` and tried
    again. In a forked child a beat does nothing.

    Raises:
        ValueError: `role` is not a plain file name.
    """

    def __init__(self, folder: Path, rank: int, role: str = "trainer") -> None:
        if not _NAME.fullmatch(role):
            raise ValueError(f"role {role!r}: expected letters, digits, '_', '.', '-'")
        self.path = folder / f"{role}-rank{rank}{_SUFFIX}"
        host = _NO_NAME.sub("?", socket.gethostname()[:64])
        identity = f'"role":"{role}","rank":{rank},"pid":{os.getpid()},"host":"{host}"'
        self._channel = Channel(self.path, identity.encode())
        weakref.finalize(self, self._channel.release)

    @property
    def failures(self) -> int:
        """Tries at writing the file that failed so far."""
        return self._channel.failures

    def beat(
        self,
        *,
        phase: Phase,
        step: int = 0,
        micro_batch: int = 0,
        batch_size: int = 0,
        given: Extent = NO_EXTENT,
        run: Extent = NO_EXTENT,
    ) -> None:
        """Record that the component is alive in `phase` at `step`.

        Args:
            given: of this rank's micro-batches of the step, as its data made them.
            run: of those that the engine was called with.
        """
        self._channel.put(_PHASE_BYTES[phase], step, micro_batch, batch_size, *given, *run)

    def close(self) -> None:
        """Write the last record within 5 s; a file system that blocks longer is left to itself."""
        self._channel.close()


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
    for field in fields(Beat):
        key, declared = field.name, field.type
        value = body.get(key, None if field.default is MISSING else field.default)
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
