"""Keeps a heartbeat's file as new as the memory that it shares with a rank.

beat_channel.py runs `python -I -S beat_writer.py PATH DESCRIPTOR` with every signal blocked: this
file imports nothing of the package. It looks at the memory twice a second: a rank that woke it at
every beat would pay more for that than for the beat. The end of standard input says
that the rank is gone: the last beat is written, and this process ends.
"""

import contextlib
import mmap
import os
import select
import struct
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "shakedown-beat"  # of the shared memory, and of this process: at most 15 characters
RECORD_BYTES = 512  # of the file
LOOK_SECONDS = 0.5
RETRY_SECONDS = 1.0

# The memory: a head (pid and count are wider than a byte), who beats, then two beats in numbers,
# of which one is whole while the other is made.
IN_FILE_SYSTEM, WRITER, FAILURES = 0, 4, 8
IDENTITY, IDENTITY_BYTES = 16, 320
BEAT = struct.Struct("<q16s9q2dq")  # begins and ends with its count: both are equal in a whole one
SLOTS = (IDENTITY + IDENTITY_BYTES, IDENTITY + IDENTITY_BYTES + BEAT.size)
MEMORY_BYTES = SLOTS[1] + BEAT.size
MOST = 10**10  # of a number: a record always fits its file

# The numbers of a beat after its phase, by their names in the record.
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


def newest(memory: bytes) -> bytes:
    """The record of the newest whole beat; empty where there is none."""
    beats = [BEAT.unpack_from(memory, slot) for slot in SLOTS]
    whole = [beat for beat in beats if beat[0] == beat[-1] > 0]
    if not whole:
        return b""
    count, phase, *numbers, wall, monotonic, _ = max(whole)
    known = memory[IDENTITY : IDENTITY + IDENTITY_BYTES].rstrip(b"\0").decode()
    counts = "".join(
        f'"{name}":{min(max(value, -1), MOST)},'
        for name, value in zip(COUNTS, numbers, strict=True)
    )
    times = f'"count":{count},"wall":{wall:.3f},"monotonic":{monotonic:.3f}'
    text = phase.rstrip(b"\0").decode("ascii", "replace")
    return framed(f'{{{known},"phase":"{text}",{counts}{times}}}'.encode())


def settled(read: "Callable[[], bytes]") -> bytes:
    """What two reads in a row agree on, or else the fifth: no beat of it is half made."""
    last = read()
    for _ in range(4):
        before, last = last, read()
        if last == before:
            break
    return last


def framed(body: bytes) -> bytes:
    """The fixed-size record: CRC-32 in hex, a space, JSON, padding, newline.

    Raises:
        ValueError: the body is too long.
    """
    if len(body) + 10 > RECORD_BYTES:
        raise ValueError(f"heartbeat record of {len(body)} bytes does not fit")
    padded = body.ljust(RECORD_BYTES - 10)
    return b"%08x " % zlib.crc32(padded) + padded + b"\n"


class BeatFile:
    """The file, opened again after every failure: a mount that came back has other handles."""

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self._path, self._memory = path, memory
        self._descriptor = -1
        self._written = b""
        self._failures = int.from_bytes(memory[FAILURES : FAILURES + 8], "little")
        memory[WRITER : WRITER + 4] = os.getpid().to_bytes(4, "little")

    def update(self) -> bool:
        """Write the newest record where it is new; whether the file is as new as the memory."""
        record = newest(settled(lambda: self._memory[:MEMORY_BYTES]))
        if record == self._written:
            return True
        self._memory[IN_FILE_SYSTEM] = 1  # for a collector, should this never return
        try:
            self._write(record)
        except OSError:
            self._failures += 1
            self._memory[FAILURES : FAILURES + 8] = self._failures.to_bytes(8, "little")
            self._close()
            return False
        finally:
            self._memory[IN_FILE_SYSTEM] = 0
        self._written = record
        return True

    def _write(self, record: bytes) -> None:
        if self._descriptor < 0:
            # pathlib takes as long to import as this program to start
            os.makedirs(os.path.dirname(self._path), exist_ok=True)  # noqa: PTH103, PTH120
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # one write below the page size: a reader sees the old or the new record, or its checksum
        if os.pwrite(self._descriptor, record, 0) != RECORD_BYTES:
            raise OSError("the record was cut off")

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def main() -> None:
    """Follow the rank until it is gone."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(NAME)
    file = BeatFile(sys.argv[1], mmap.mmap(int(sys.argv[2]), MEMORY_BYTES))
    while True:
        done = file.update()
        ready, _, _ = select.select([0], [], [], LOOK_SECONDS if done else RETRY_SECONDS)
        if ready and not os.read(0, 65536):
            file.update()
            return


if __name__ == "__main__":
    main()
