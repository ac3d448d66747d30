"""Which processes to look at: by id, pattern or Slurm job, or by the heartbeats of an attempt."""

import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.core.paths import AttemptPaths
from shakedown.monitor.collect import environ, hooked, proc, ray
from shakedown.monitor.collect.bounded import run_bounded
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.slurm.hostlist import node_name

MAX_PID = 2**22  # Linux's own limit
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_LIST_SECONDS = 20.0
# Collectors of other sessions, and their starters from another host: not part of the job.
_OWN = re.compile(r"shakedown(?:\.cli)? (?:hang collect|watch)|shakedown\.monitor\.attach")
# How MPI's launchers number ranks: Open MPI, then MPICH and Intel MPI.
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_OF_RANKS = (
    b"RANK=", b"SLURM", b"LOCAL_RANK=", b"LOCAL_WORLD_SIZE=", b"WORLD_SIZE=", b"MASTER_",
    *(f"{name}=".encode() for name in _OF_MPI),
)  # fmt: skip
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Target:
    """One process. `name` names its files, such as `trainer-rank0`.

    `role` of a worker of Ray: `actor PolicyWorker`, and its name is `PolicyWorker-rank3`. `world`:
    the number of ranks, 0 where it is not known.
    """

    name: str
    pid: int
    role: str = "trainer"
    rank: int | None = None
    world: int = 0
    hook: hooked.Hook | None = field(default=None, compare=False)  # None: not looked for yet

    @property
    def of_ray(self) -> bool:
        """Whether a Ray worker, of which an actor's rank is one among those of its class."""
        return self.role.startswith((f"{ray.ACTOR} ", f"{ray.TASK} "))

    @property
    def file_name(self) -> str:
        """`name` without anything that could leave the folder.

        A class of an actor may be called like any role: its files go by its process.
        """
        if self.of_ray:
            return f"pid{self.pid}"
        return _UNSAFE.sub("_", self.name).lstrip(".")[:100] or f"pid{self.pid}"


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    command: str
    python: bool


def from_pids(pids: Iterable[int]) -> list[Target]:
    """Targets by process id; the rank comes from the process's hook or environment, if readable.

    Raises:
        UsageError: a number that cannot be a process: 0 and below mean groups of processes.
    """
    given = sorted(set(pids))
    for pid in given:
        if not 0 < pid <= MAX_PID:
            raise UsageError(f"--pid {pid}: expected a process id, 1 to {MAX_PID}")
    return _named(given)


def from_pattern(pattern: str) -> list[Target]:
    """Processes of this user whose command line matches, this one and its parents left out.

    Shells, `srun` and `timeout` that match are left out where a Python process does, and a
    process's own workers (same rank, or the same command) are read with it.

    Raises:
        UsageError: the pattern is not a regular expression.
        CannotJudgeError: the command line of a process cannot be read.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--match {pattern!r} is not a regular expression: {error}") from error
    matching = {p.pid: p for p in _processes() if expression.search(p.command)}
    return _named(_outermost(matching))


def from_job(job_id: str) -> list[Target]:
    """This user's Python processes of a Slurm job on this node, without the job's collectors."""
    found = {}
    for process in _processes():
        environment = _environment(process.pid) if process.python else {}
        if environment.get("SLURM_JOB_ID") == job_id and _is_of_this_node(process.pid):
            found[process.pid] = process
    return _named(_outermost(found), f"{node_name()}-")


def from_processes(pids: Collection[int]) -> list[Target]:
    """Ranks among the processes of a program, or else all of its Python processes.

    Shells and launchers are left out where there are ranks, and so are workers of a rank. Of Ray,
    busy workers and the driver are included.
    """
    found = {p.pid: p for p in _processes() if p.pid in pids and _is_of_this_node(p.pid)}
    targets = _named(_outermost(found))
    if any(target.of_ray for target in targets):
        return targets
    return [target for target in targets if target.rank is not None] or targets


def _is_of_this_node(pid: int) -> bool:
    """Whether it belongs to this node: nodes of Slurm that share a host see each other's."""
    return _environment(pid).get("SLURMD_NODENAME", node_name()) == node_name()


def from_attempt(attempt: Path) -> list[Target]:
    """The components of an attempt that run on this host, by their heartbeats.

    Raises:
        UsageError: the folder has no heartbeats.
    """
    folder = AttemptPaths(attempt).heartbeats
    beats = read_heartbeats(folder)
    if not beats:
        raise UsageError(
            f"{attempt} has no heartbeats: expected {folder}/*.beat",
            hint="shakedown hang collect --pid PID --out DIR",
        )
    host = socket.gethostname()
    return [
        Target(b.name, b.pid, b.role, b.rank)
        for b in beats
        if b.host == host and 0 < b.pid <= MAX_PID
    ]


def missing_ranks(targets: Iterable[Target]) -> list[int]:
    """Ranks that should run on this node, according to the others' environment, but do not.

    torchrun gives the number of ranks on its node; all ranks of a job whose store is on loopback
    are here. A rank under another command is found by its environment, too.
    """
    expected: dict[tuple[str, str], set[int]] = {}
    for target in targets:
        environment = _environment(target.pid)
        local = _own_ranks(environment)
        if local:
            expected.setdefault(_store(environment), set()).update(local)
    if not expected:
        return []
    environments = [_environment(p.pid) for p in _processes() if p.python]
    living = {(*_store(e), e.get("RANK", "")) for e in environments}
    return sorted(
        rank
        for store, ranks in expected.items()
        for rank in ranks
        if (*store, str(rank)) not in living
    )


def _store(environment: Mapping[str, str]) -> tuple[str, str]:
    """The address where the ranks of a job meet, which distinguishes jobs."""
    return environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")


def _own_ranks(environment: Mapping[str, str]) -> range:
    """The ranks of this node; empty where they are not known."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = (environment.get(name, "") for name in names)
    rank, world, local, count = (int(t) if t.isdecimal() and len(t) < 7 else -1 for t in texts)
    if rank >= local >= 0 and count > local:
        return range(rank - local, rank - local + count)
    if rank >= 0 and world > rank and environment.get("MASTER_ADDR") in _HERE:
        return range(world)
    return range(0)


def _processes() -> list[_Process]:
    """This user's processes. A command line is in the process's memory: reading it can hang."""
    (found,) = run_bounded([_list], 1, _LIST_SECONDS)
    if not isinstance(found, list):
        raise CannotJudgeError(
            f"the command lines of all processes were not readable in {_LIST_SECONDS:.0f} s: "
            f"{found or 'the kernel holds one of them'}",
            hint="shakedown hang collect --pid PID --out DIR",
        )
    return found


def _list() -> list[_Process]:
    own = {os.getpid()}
    above = os.getppid()
    while above > 0 and above not in own:
        own.add(above)
        above = proc.parent(above)
    found = []
    for pid in proc.all_pids():
        if pid not in own and proc.owner(pid) == os.getuid():
            text = proc.command(pid)
            if text and not _OWN.search(text):
                found.append(_Process(pid, proc.parent(pid), text, proc.is_python(pid)))
    return found


def _outermost(found: Mapping[int, _Process]) -> list[int]:
    """Python processes if there are any, without the workers of those that are found."""
    chosen = {pid: p for pid, p in found.items() if p.python} or dict(found)
    chosen = {pid: p for pid, p in chosen.items() if not ray.is_own(pid, p.command)}
    environments = {pid: _environment(pid) for pid in chosen}
    launched = any("RANK" in environment for environment in environments.values())
    ranks = {p: _rank_text(p, e, launched=launched) for p, e in environments.items()}
    workers = {
        process.pid
        for process in chosen.values()
        for above in _above(process.pid, chosen)
        if ranks[above] == ranks[process.pid]
        and (ranks[process.pid] or chosen[above].command == process.command)
    }
    return sorted(set(chosen) - workers)


def _above(pid: int, found: Collection[int]) -> list[int]:
    """The ancestors of a process that are found, too."""
    above, seen, pid = [], {pid}, proc.parent(pid)
    while pid > 1 and pid not in seen:
        seen.add(pid)
        if pid in found:
            above.append(pid)
        pid = proc.parent(pid)
    return above


def _named(pids: Sequence[int], prefix: str = "") -> list[Target]:
    """Targets with their names. Several processes that claim one rank belong to different jobs and
    are named by process id. A process below another one of its rank is that one's worker.
    """
    environments = {pid: _environment(pid) for pid in pids}
    launched = any("RANK" in environment for environment in environments.values())
    ranked = [
        _worker_of_ray(pid, environments[pid]) or _ranked(pid, environments[pid], launched=launched)
        for pid in pids
    ]
    named = {target.pid: target.name for target in ranked if target}
    workers = {p for p, name in named.items() if name in (named[a] for a in _above(p, named))}
    ranked = [None if target and target.pid in workers else target for target in ranked]
    claims = Counter(target.name for target in ranked if target)
    beside_ray = any(target and target.of_ray for target in ranked)
    unknown = ray.DRIVER if beside_ray else "trainer"
    return [
        target if target and claims[target.name] == 1 else Target(f"{prefix}pid{pid}", pid, unknown)
        for pid, target in zip(pids, ranked, strict=True)
    ]


def _ranked(pid: int, environment: Mapping[str, str], *, launched: bool) -> Target | None:
    """The target's rank, by our hook or by the environment."""
    hook = hooked.find(pid)
    if hook is not None:
        return Target(hook.name, pid, hook.role, hook.rank, hook=hook)
    rank = _number(_rank_text(pid, environment, launched=launched))
    return None if rank is None else Target(f"trainer-rank{rank}", pid, "trainer", rank)


def _worker_of_ray(pid: int, given: Mapping[str, str]) -> Target | None:
    """A worker by the name that Ray gives the process, and by the rank from its driver."""
    found = ray.worker_of(pid)
    if found is None:
        return None
    told = given if "RANK" in given else environ.environ_now(pid, _OF_RANKS)
    rank, world = (_number(told.get(name, "")) for name in ("RANK", "WORLD_SIZE"))
    rank = found.rank if rank is None else rank
    name = f"{found.name}-{f'pid{pid}' if rank is None else f'rank{rank}'}"
    return Target(name, pid, found.role, rank, world or 0)


def _number(text: str) -> int | None:
    """A rank of at most seven digits, as in the names of the hook's files."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 8 else None


def _rank_text(pid: int, environment: Mapping[str, str], *, launched: bool) -> str:
    """The rank in the environment. A launcher is not a rank, even once its ranks are gone: its
    number is its node's, from Slurm or as Kubernetes' RANK. `launched`: SLURM_PROCID is not a rank
    below another process.
    """
    if proc.is_launch(proc.command(pid)):
        return ""
    if launched:
        return environment.get("RANK", "")
    # A batch script's own SLURM_PROCID is always 0: only a step's counts.
    numbers = [environment.get(name, "") for name in ("RANK", *_OF_MPI)]
    numbers += [environment.get("SLURM_PROCID", "")] if "SLURM_STEP_ID" in environment else []
    return next(filter(None, numbers), "")


def _environment(pid: int) -> dict[str, str]:
    """The variables that identify a process's job and rank, as of its program's start."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    rows = (row.decode("utf-8", "replace") for row in raw.split(b"\0") if row.startswith(_OF_RANKS))
    pairs = (row.partition("=") for row in rows)
    return {key: value for key, _, value in pairs}
