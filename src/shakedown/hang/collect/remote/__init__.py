"""Python stacks of sleeping processes, read from their memory: nobody is paused or signalled.

Only what is certain is given: one interpreter of a release that was tested, all of its threads
asleep from before the first read until after the last, every object of the type that it must
have. Of any other process nothing is said, and py-spy reads it.
"""

from shakedown.hang.collect import proc
from shakedown.hang.collect.remote.image import Images
from shakedown.hang.collect.remote.memory import Memory, Moved, Unreadable
from shakedown.hang.collect.remote.rows import Rows
from shakedown.hang.collect.remote.threads import Interpreter

__all__ = ["Moved", "Reader", "Unreadable"]


class Reader:
    """Reads processes; what they have in common is looked up once."""

    def __init__(self) -> None:
        self._images, self._rows = Images(), Rows()
        self._places: dict[str, int] = {}

    def read(self, pid: int) -> str:
        """All threads, as `py-spy dump --json` gives them.

        Raises:
            Unreadable: this process is not one of whose stacks we are sure; the text says why.
            Moved: it is one, but it runs.
        """
        root = f"/proc/{pid}/root" if _elsewhere(pid, "mnt") else ""
        if _elsewhere(pid, "pid"):
            raise Unreadable("another namespace of process ids")
        with Memory(pid) as memory:
            interpreter = Interpreter(memory, self._images.symbols(pid, memory))
            threads = interpreter.threads(pid, self._places)
        return self._rows.text(pid, threads, root)


def _elsewhere(pid: int, kind: str) -> bool:
    return proc.link(f"/proc/{pid}/ns/{kind}") != proc.link(f"/proc/self/ns/{kind}")
