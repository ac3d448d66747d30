"""Which processes to look at: by id, by pattern, or by the heartbeats of an attempt."""

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shakedown.errors import UsageError
from shakedown.hang.heartbeat import read_heartbeats
from shakedown.paths import AttemptPaths

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Target:
    """One process. `name` names its files, such as `trainer-rank0`."""

    name: str
    pid: int
    role: str = "trainer"
    rank: int | None = None

    @property
    def file_name(self) -> str:
        """`name` without anything that could leave the folder."""
        return _UNSAFE.sub("_", self.name).lstrip(".")[:100] or f"pid{self.pid}"


def from_pids(pids: Iterable[int]) -> list[Target]:
    """Targets by process id; the rank comes from the process's own environment, if readable."""
    return [_target(pid) for pid in sorted(set(pids))]


def from_pattern(pattern: str) -> list[Target]:
    """Processes of this user whose command line matches, this one and its parents left out.

    Raises:
        UsageError: the pattern is no regular expression.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--match {pattern!r} is not a regular expression: {error}") from error
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    pids = [
        process.pid
        for process in psutil.process_iter(["cmdline", "uids"])
        if process.pid not in own
        and process.info["uids"]
        and process.info["uids"].real == os.getuid()
        and expression.search(" ".join(process.info["cmdline"] or []))
    ]
    return from_pids(pids)


def from_attempt(attempt: Path) -> list[Target]:
    """The components of an attempt that run on this host, by their heartbeats.

    Raises:
        UsageError: the folder has no heartbeats.
    """
    beats = read_heartbeats(AttemptPaths(attempt).heartbeats)
    if not beats:
        raise UsageError(
            f"{attempt} has no heartbeats: expected {attempt / 'heartbeat'}/*.beat",
            hint="shakedown hang collect --pid PID --out DIR",
        )
    host = socket.gethostname()
    return [Target(b.name, b.pid, b.role, b.rank) for b in beats if b.host == host]


def _target(pid: int) -> Target:
    environment = _environment(pid)
    rank = environment.get("RANK") or environment.get("SLURM_PROCID") or ""
    if rank.isdecimal():
        return Target(f"trainer-rank{int(rank)}", pid, "trainer", int(rank))
    return Target(f"pid{pid}", pid)


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (row.partition("=") for row in raw.decode("utf-8", "replace").split("\0"))
    return {key: value for key, _, value in pairs}
