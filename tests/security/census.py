"""Who listens where while something runs: all processes of it, looked at a few times a second."""

import contextlib
import ipaddress
import os
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Self

import psutil

_MARK = "SHAKEDOWN_CENSUS"
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, order=True)
class Listener:
    """A listening TCP socket: the process's command line, and the address without its port."""

    program: str
    address: str

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Census:
    """Use it as `with Census() as census:` around a program that is given its `environment`.

    Processes that the program starts carry the mark on, also as daemons and through Slurm; those
    that overwrite it with their title are known by their parents and sessions.
    """

    def __init__(self) -> None:
        self.environment = {_MARK: uuid.uuid4().hex}
        self.listeners: set[Listener] = set()
        self.commands: set[str] = set()
        self._known: set[tuple[int, float]] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()

    def beyond_loopback(self) -> list[Listener]:
        return sorted(each for each in self.listeners if not each.loopback)

    def look(self) -> None:
        """One look at all processes and sockets."""
        commands = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._is_ours(process):
                    commands[process.pid] = " ".join(process.cmdline())
        self.commands.update(commands.values())
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.pid in commands and found.laddr:
                self.listeners.add(Listener(commands[found.pid], found.laddr.ip))

    def _is_ours(self, process: psutil.Process) -> bool:
        who = (process.pid, process.create_time())
        if who in self._known:
            return True
        known = {pid for pid, _ in self._known}
        ours = (
            process.environ().get(_MARK) == self.environment[_MARK]
            or process.ppid() in known
            or os.getsid(process.pid) in known
        )
        if ours:
            self._known.add(who)
        return ours

    def _keep(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            began = time.monotonic()
            self.look()
            # A look at a busy machine takes long: the run has more of it than the census.
            self._done.wait(time.monotonic() - began)
