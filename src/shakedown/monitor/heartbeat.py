"""A step counter per component: one small file each, overwritten in place by one write.

Stacks do not show that two ranks count different batches or run other shapes; these records do.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from shakedown.core.errors import UntrustedError
from shakedown.core.files import json_as
from shakedown.core.private import make_folders, open_own
from shakedown.progress.signs import Beat, Phase

PHASES: tuple[str, ...] = get_args(Phase)

Extent = tuple[int, int, int]  # micro-batches, the most rows of one, the most tokens of a row
NO_EXTENT: Extent = (0, 0, 0)

# Holds the longest record there can be, and stays far below a page: see `_write`.
RECORD_BYTES = 512
# How long `beat` waits for its record to be written. A local disk takes 0.1 ms; a beat that is
# followed by a call that holds the interpreter, or by the end of the process, must not be lost.
HANDOVER_SECONDS = 0.1
RETRY_SECONDS = 1.0  # between two tries at a file system that refused
CLOSE_SECONDS = 5.0
_NAME, _NO_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}"), re.compile(r"[^A-Za-z0-9_.-]")
_SUFFIX = ".beat"
# The numbers of a beat after its phase, but for its own count.
COUNTS = (
    "step",
    "micro_batch",
    "batch_size",
    "given_count",
    "given_rows",
    "given_width",
    "run_count",
    "run_rows",
    "run_width",
)
_MOST = 10**10  # of a number: a record always fits its file


def host_name() -> str:
    """This host as a beat names it."""
    return _NO_NAME.sub("?", socket.gethostname()[:64])


class Heartbeat:
    """Writes `folder/<role>-rank<rank>.beat`. Call `beat` from the component's main loop.

    A thread writes the file, and a beat waits for it for a moment only: a file system that blocks
    or fails never stops the training. Failures are counted in `failures`, said once on standard
    error, and tried again. In a forked child a beat does nothing.

    Raises:
        ValueError: `role` is not a plain file name.
    """

    def __init__(self, folder: Path, rank: int, role: str = "trainer") -> None:
        if not _NAME.fullmatch(role):
            raise ValueError(f"role {role!r}: expected letters, digits, '_', '.', '-'")
        self.path = folder / f"{role}-rank{rank}{_SUFFIX}"
        self._role, self._rank, self._owner = role, rank, os.getpid()
        self._host = host_name()
        self._count = 0
        self._writer = _Writer(self.path.absolute())
        # Also when the interpreter ends: the last beat says how far the component came.
        weakref.finalize(self, self._writer.close, self._owner)

    @property
    def failures(self) -> int:
        """Tries at writing the file that failed so far."""
        return self._writer.failures

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
        # A forked worker of a data loader has this object too; it would overwrite the rank's beat,
        # and has no writer, as threads do not survive a fork.
        if os.getpid() != self._owner:
            return
        self._count += 1
        self._writer.put(
            Beat(
                role=self._role,
                rank=self._rank,
                pid=self._owner,
                host=self._host,
                phase=phase,
                step=_bounded(step),
                micro_batch=_bounded(micro_batch),
                batch_size=_bounded(batch_size),
                count=self._count,
                wall=round(time.time(), 3),
                monotonic=round(time.monotonic(), 3),
                given_count=_bounded(given[0]),
                given_rows=_bounded(given[1]),
                given_width=_bounded(given[2]),
                run_count=_bounded(run[0]),
                run_rows=_bounded(run[1]),
                run_width=_bounded(run[2]),
            )
        )

    def close(self) -> None:
        """Write the last record within 5 s; a file system that blocks longer is left to itself."""
        self._writer.close(self._owner)


def _bounded(number: int) -> int:
    return min(max(number, -1), _MOST)


class _Writer:
    """Keeps the file as new as the newest beat, in a thread that starts with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._newest: Beat | None = None
        self._written: Beat | None = None
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        self._ended = False
        self.failures = 0

    def put(self, beat: Beat) -> None:
        """Hand over a beat; waits for a writer that is not behind, at most HANDOVER_SECONDS."""
        with self._changed:
            # A writer that is behind is held by the file system: waiting for it at every beat
            # would slow each step.
            behind = self._newest is not self._written
            self._newest = beat
            # Also after a `close`: the component may go on.
            if self._thread is None:
                self._ended = False
                self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if not behind:
                self._changed.wait_for(lambda: self._written is beat, HANDOVER_SECONDS)

    def close(self, owner: int) -> None:
        """End the thread after its last record; nothing in a forked child, which has no thread."""
        if os.getpid() != owner:
            return
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        # Signals are for the component's own threads: a handler may wait for the main one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (beat := self._next()) is not None:
            if self._write(beat):
                with self._changed:
                    self._written = beat
                    self._changed.notify_all()
            elif self._ended_within(RETRY_SECONDS):
                break
        self._close_file()

    def _next(self) -> Beat | None:
        """The newest beat once it is not in the file; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not self._written or self._ended)
            return self._newest if self._newest is not self._written else None

    def _ended_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, seconds)

    def _write(self, beat: Beat) -> bool:
        """Whether it is in the file, which is opened again after a failure: a mount that came
        back has other handles."""
        try:
            if self._descriptor < 0:
                make_folders(self._path.parent)
                self._descriptor = open_own(self._path, os.O_WRONLY)
            # one write below the page size: a reader sees the old record, the new one or, by its
            # checksum, that it is torn
            if os.pwrite(self._descriptor, encode(beat), 0) != RECORD_BYTES:
                raise OSError("the record was cut off")
        except (OSError, UntrustedError) as error:
            self._close_file()
            self.failures += 1
            if self.failures == 1:
                why = getattr(error, "strerror", None) or str(error)
                with contextlib.suppress(OSError):  # the log may be on the same full disk
                    print(f"heartbeat: cannot write {self._path}: {why}", file=sys.stderr)
                    sys.stderr.flush()
            return False
        return True

    def _close_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def encode(beat: Beat) -> bytes:
    """The record of a beat, RECORD_BYTES long: CRC-32 in hex, a space, JSON, padding, newline.

    Raises:
        ValueError: the beat is too long.
    """
    body = json.dumps(asdict(beat), separators=(",", ":")).encode()
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
    try:
        return json_as(Beat, body, unknown="ignore") if isinstance(body, Mapping) else None
    except ValueError:
        return None


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
