"""Keeps a heartbeat's file as new as the memory that it shares with a rank.

beat_channel.py runs `python -I -S beat_writer.py PATH DESCRIPTOR` with every signal blocked: this
file imports nothing of the package. Each byte on standard input says that the memory holds a newer
record; its end, that the rank is gone: the last record is written, and this process ends.
"""

import contextlib
import mmap
import os
import select
import sys

NAME = "shakedown-beat"  # of the shared memory, and of this process: at most 15 characters
RECORD_BYTES = 512
MEMORY_BYTES = 3 * RECORD_BYTES  # a head, then two records: one is whole while the other is made
NEWEST, IN_FILE_SYSTEM, WRITER, FAILURES = 0, 1, 4, 8  # bytes of the head; pid and count are wider
RETRY_SECONDS = 1.0


def newest(memory: bytes) -> bytes:
    """The newest whole record; zeros before the first one."""
    begin = RECORD_BYTES * (1 + (memory[NEWEST] & 1))
    return memory[begin : begin + RECORD_BYTES]


class BeatFile:
    """The file, opened again after every failure: a mount that came back has other handles."""

    def __init__(self, path: str, memory: mmap.mmap) -> None:
        self._path, self._memory = path, memory
        self._descriptor = -1
        self._written = bytes(RECORD_BYTES)
        self._failures = int.from_bytes(memory[FAILURES : FAILURES + 8], "little")
        memory[WRITER : WRITER + 4] = os.getpid().to_bytes(4, "little")

    def update(self) -> bool:
        """Write the newest record where it is new; whether the file is as new as the memory."""
        record = newest(self._memory[:MEMORY_BYTES])
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
        ready, _, _ = select.select([0], [], [], None if done else RETRY_SECONDS)
        if ready and not os.read(0, 65536):
            file.update()
            return


if __name__ == "__main__":
    main()
