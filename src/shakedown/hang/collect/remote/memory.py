"""Another process's memory, read without a pause: whole and bounded, or refused."""

import os
from types import TracebackType
from typing import Self

MAX_ADDRESS = 2**47  # user space of x86-64 (Documentation/arch/x86/x86_64/mm.rst)
MAX_BYTES = 64 * 2**20  # of one process: ten times what a thousand threads need


class Unreadable(Exception):  # noqa: N818  # no fault: py-spy reads this process
    """The process is not exactly what this reader understands. The text says what was found."""


class Moved(Unreadable):
    """It runs, or ran while it was read: a moment later it may sleep."""


class Memory:
    """`/proc/PID/mem`: it stays that of the process that was opened, whoever gets its id later."""

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unreadable(f"memory: {error.strerror}") from error
        self._left = MAX_BYTES
        self._witnessed: list[tuple[int, bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def read(self, address: int, size: int) -> bytes:
        """`size` bytes at `address`.

        Raises:
            Unreadable: not all of them are mapped, or too much was read in all.
        """
        self._left -= size
        if not (0 < address < MAX_ADDRESS and 0 <= size <= self._left):
            raise Unreadable(f"address {address:#x}, {size} bytes")
        try:
            body = os.pread(self._file, size, address)
        except OSError as error:
            raise Unreadable(f"address {address:#x}: {error.strerror}") from error
        if len(body) != size:
            raise Unreadable(f"address {address:#x}: {len(body)} of {size} bytes")
        return body

    def witness(self, address: int, size: int) -> bytes:
        """`read`, remembered for `confirm`."""
        body = self.read(address, size)
        self._witnessed.append((address, body))
        return body

    def confirm(self) -> None:
        """Read again what was witnessed.

        Raises:
            Unreadable: something changed.
        """
        for address, body in self._witnessed:
            if self.read(address, len(body)) != body:
                raise Moved(f"address {address:#x} changed")
