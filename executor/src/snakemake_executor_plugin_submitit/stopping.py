"""What ends this process from outside: Ctrl-C cancels its jobs, SIGTERM and SIGHUP leave them.

A login node that is rebooted sends SIGTERM, a terminal that is closed SIGHUP: both cost no work.
"""

import shlex
import signal
import threading
from collections.abc import Sequence
from pathlib import PurePath
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Turns the first of these signals into a KeyboardInterrupt, for which Snakemake stops.

    Further ones change nothing: in the middle of Snakemake's own end each would be a traceback.
    """

    def __init__(self) -> None:
        self.by: signal.Signals | None = None

    @property
    def leaves_jobs(self) -> bool:
        """Whether the jobs are to run on."""
        return self.by in (signal.SIGTERM, signal.SIGHUP)

    def listen(self) -> None:
        """Take the signals; again after Snakemake has taken SIGTERM, for which it would wait."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _NUMBERS:
            # Ignored by whoever started us: nohup, or a shell that put us into the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self.by is None:
            self.by = signal.Signals(number)
            raise KeyboardInterrupt


def same_command(argv: Sequence[str], *, reruns_incomplete: bool) -> str:
    """The command that goes on with this run's jobs, for a shell.

    `reruns_incomplete`: whether Snakemake was told, by an option or a profile, that outputs which
    nobody has recorded as complete are no reason to stop.
    """
    name = PurePath(argv[0]).name
    program = "snakemake" if name in ("__main__.py", "snakemake") else argv[0]
    more = () if reruns_incomplete else ("--rerun-incomplete",)
    return shlex.join([program, *argv[1:], *more])
