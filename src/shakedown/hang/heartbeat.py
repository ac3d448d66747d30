"""A step counter per component: one small file each, overwritten in place by one write.

Stacks do not show that two ranks count different batches; these records do.
"""

import json
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

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

# One write below the page size: a reader sees the old or the new record, or the checksum tells.
RECORD_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SUFFIX = ".beat"


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

    A beat costs one `pwrite` of 512 bytes to the page cache. A file system that fails never
    ends the training: the failure is counted in `failures` and the next beat tries again.

    Raises:
        ValueError: `role` is not a plain file name.
    """

    def __init__(self, folder: Path, rank: int, role: str = "trainer") -> None:
        if not _NAME.fullmatch(role):
            raise ValueError(f"role {role!r}: expected letters, digits, '_', '.', '-'")
        self.path = folder / f"{role}-rank{rank}{_SUFFIX}"
        self.failures = 0
        self._role, self._rank = role, rank
        self._host, self._count = socket.gethostname()[:64], 0
        self._descriptor = -1

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
        try:
            if self._descriptor < 0:
                self._descriptor = self._open()
            os.pwrite(self._descriptor, encode(record), 0)
        except OSError:
            self.failures += 1

    def close(self) -> None:
        """Close the file; the last record stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def encode(beat: Beat) -> bytes:
    """The fixed-size record: CRC-32 in hex, a space, JSON, padding, newline."""
    body = json.dumps(vars(beat), separators=(",", ":")).encode()
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


def _read(path: Path) -> Beat | None:
    try:
        with path.open("rb") as stream:
            return decode(stream.read(RECORD_BYTES))
    except OSError:
        return None
