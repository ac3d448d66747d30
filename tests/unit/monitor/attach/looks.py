"""Looks as samplers give them, made by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

from shakedown.monitor.attach.sampler import Look, WatchedProcess
from shakedown.progress.signs import Activity


@dataclass
class Rank:
    """A rank that goes on as its test says; each method is what happened until the next look."""

    rank: int | None
    host: str = "n1"
    pid: int = 0
    state: str = "S"
    cpu: float = 0.0
    io: int = 0
    output: int = 0
    here: bool = True

    def process(self, now: float) -> WatchedProcess:
        name = f"trainer-rank{self.rank}" if self.rank is not None else f"{self.host}-pid7"
        pid = self.pid or 100 + (self.rank or 0)
        activity = Activity(now, self.cpu, self.io, self.output)
        return WatchedProcess(name, pid, 1, self.rank, self.state, activity)


def looks_at(
    ranks: Sequence[Rank], now: float, *, silent: Sequence[str] = (), absent: Sequence[int] = ()
) -> dict[str, Look | None]:
    """What the samplers of all hosts of `ranks` give at `now`."""
    found: dict[str, Look | None] = {}
    for host in sorted({rank.host for rank in ranks}):
        there = [rank.process(now) for rank in ranks if rank.host == host and rank.here]
        found[host] = None if host in silent else Look(1, host, 0.01, there, absent)
    return found
