"""A process that was written down, found again later: a number alone may be another process's."""

from dataclasses import dataclass
from typing import Self

from shakedown.processes.guard import Process, look, send
from shakedown.processes.identity import boot_id


@dataclass(frozen=True)
class Recorded:
    """A process; `started` in clock ticks since the start of the machine, which `boot` names."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The living process that has this number now.

        Raises:
            ProcessLookupError: there is none.
        """
        found = look(pid)
        if found is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, found.started, boot_id())

    @property
    def found(self) -> Process | None:
        """It, also as a zombie; None when it is gone or ran before the machine's last start."""
        # Empty and 0 are what a record says of a process that was never started.
        if self.pid <= 0 or not self.boot or self.boot != boot_id():
            return None
        process = look(self.pid)
        return process if process is not None and process.started == self.started else None

    @property
    def lives(self) -> bool:
        """Whether it runs on this machine."""
        process = self.found
        return process is not None and not process.ended

    def send(self, signum: int) -> None:
        """Signal it, and no other process; nothing when it is gone."""
        process = self.found
        send([] if process is None else [process], signum)
