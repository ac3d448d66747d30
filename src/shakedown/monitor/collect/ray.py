"""Ray: the worker that a process is, the state of the cluster, and its logs.

Ray names its processes (setproctitle): `ray::PolicyWorker.step` runs a method, `ray::PolicyWorker`
waits for one, `ray::IDLE` belongs to nobody. A worker's standard error is a file of its own in the
session's folder, which begins with the actor's name as its `__repr__` gives it.
"""

import json
import os
import re
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shakedown.monitor.collect import proc, ray_state

SCHEMA = "shakedown/ray/1"
ACTOR, TASK = "actor", "task"  # begin the role of a worker
DRIVER = "driver"  # the role of the program that made them
# `ray start` gives them to what it starts, also where it found the token in ~/.ray by itself.
_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME")
_STATE_SECONDS = 20.0  # the head's store gives up on itself after 15
_HEAD_BYTES, _TAIL_BYTES = 4096, 256 * 1024
_MOST_LINES = 40  # of a log
# With a `__repr__` it may be `PolicyWorker[rank=3]`; older versions add `()`.
_TITLE = re.compile(r"ray::([A-Za-z_]\w{0,79})[^.]{0,80}?(\.\w{1,80})?(?:\(\))?\s*")
_TOLD = re.compile(
    r"^:(actor|task)_name:([A-Za-z_]\w{0,79})(?:\S{0,40}?rank[=: ]?(\d{1,6})\b)?", re.M
)
# Ray's own Python processes, of which none is a part of the job.
_OWN = re.compile(
    r"/ray/(?:_private|dashboard|autoscaler|core)/|-m ray\.scripts|(?:^|/)ray start "
    r"|^ray::(?:IDLE|DashboardAgent|RuntimeEnvAgent)\b"
)
# Log lines of its daemons about a head that is gone and about a full object store.
_TELLING = re.compile(
    r"(?i:object store is full|out of disk)|OutOfDisk|ObjectStoreFull"
    r"|(?i:failed to connect to gcs|gcs .{0,60}(?:unreachable|unavailable|did not|lost))"
)


class RayWorker(NamedTuple):
    """The actor or task of a Ray process. `rank`: of its `__repr__`, None where that has none."""

    role: str
    name: str
    rank: int | None = None


def worker_of(pid: int) -> RayWorker | None:
    """The actor or task of a process; None if it is not a worker, or has nothing to do."""
    title = proc.command(pid)
    if not title.startswith("ray::"):
        return None
    told = _TOLD.search(_begin_of(pid))
    if told:
        rank = int(told[3]) if told[3] else None
        return RayWorker(f"{told[1]} {told[2]}", told[2], rank)
    named = _TITLE.match(title)
    if named is None or _OWN.search(title):
        return None
    # Only an actor's method has a class before it.
    return RayWorker(f"{ACTOR if named[2] else TASK} {named[1]}", named[1])


def is_own(pid: int, command: str) -> bool:
    """Whether a process is Ray's own: a daemon, or a worker without work."""
    return _OWN.search(command) is not None and worker_of(pid) is None


def _begin_of(pid: int) -> str:
    """The start of its standard error if that is a file: reading a pipe would take its content."""
    try:
        descriptor = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as stream:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return stream.read(_HEAD_BYTES).decode("utf-8", "replace") if regular else ""


@dataclass(frozen=True)
class _Cluster:
    """The cluster of a raylet on this host: the head's address, the session's folder, Ray's
    Python, and the variables that the head authenticates us by."""

    address: str
    session: Path
    python: str
    token: tuple[tuple[str, str], ...]


def query(pids: Collection[int], address: str = "") -> tuple[str, str, str]:
    """State of the clusters of these processes or of `address`: (file suffix, text, missed).

    Raises:
        LookupError: no raylet of theirs runs here. Another job's may.
    """
    found = list(dict.fromkeys(_clusters(pids, address)))
    if not found:
        raise LookupError("no raylet of this job runs here")
    rows, missed = [], []
    for cluster in found:
        body, lost = _tables(cluster)
        told = {"address": cluster.address, "session": cluster.session.name}
        rows.append({**told, **body, "missed": lost, "logs": _telling(cluster.session / "logs")})
        missed += [f"{cluster.address}: {lost}"] if lost else []
    text = json.dumps({"schema": SCHEMA, "host": socket.gethostname(), "clusters": rows}, indent=1)
    return "ray.json", text + "\n", "; ".join(missed)


def _clusters(pids: Collection[int], address: str) -> Iterator[_Cluster]:
    """Clusters by the command lines of raylets, which name all three.

    A job's is the parent of its workers, a child of a driver that started it, or has the port of
    its RAY_ADDRESS: the same host may be `127.0.0.1` for one and have a name for the other.
    """
    parents = {proc.parent(pid) for pid in pids}
    told = {address, *(_address_of(pid) for pid in pids)} - {""}
    ports = {each.rpartition(":")[2] for each in told}
    for pid in proc.all_pids():
        if proc.owner(pid) != os.getuid() or not proc.link(f"/proc/{pid}/exe").endswith("/raylet"):
            continue
        text = proc.command(pid)
        head, session, python = (
            re.search(pattern, text)
            for pattern in (
                r"--gcs-address=(\S{3,200})",
                r"--session_dir=(\S{1,400})",
                r"--python_worker_command=(\S{1,400})",
            )
        )
        if not head or not session or not python:
            continue
        own = pid in parents or proc.parent(pid) in pids or head[1].rpartition(":")[2] in ports
        if own:
            token = tuple(_environ(pid, *_TOKEN).items())
            yield _Cluster(head[1], Path(session[1]), python[1], token)


def _address_of(pid: int) -> str:
    """The cluster's address in a process's environment; empty without a port."""
    found = _environ(pid, "RAY_ADDRESS").get("RAY_ADDRESS", "")
    return found if found.rpartition(":")[2].isdecimal() else ""


def _environ(pid: int, *names: str) -> dict[str, str]:
    """The given variables that its program was started with."""
    try:
        rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(row).partition("=") for row in rows)
    return {name: value for name, _, value in pairs if name in names}


def _tables(cluster: _Cluster) -> tuple[dict[str, object], str]:
    """The head's tables, by Ray's own Python; or why there are none."""
    import subprocess  # a tenth of the collector's start, needed with Ray alone

    # As text: beside a file of ours it would find this module in place of Ray.
    command = [cluster.python, "-c", Path(ray_state.__file__).read_text("utf-8"), cluster.address]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=_STATE_SECONDS,
            check=False,
            cwd="/",
            env={**os.environ, **dict(cluster.token)},
        )
    except subprocess.TimeoutExpired:
        return {}, f"the head does not answer within {_STATE_SECONDS:.0f} s"
    except OSError as error:
        return {}, f"{cluster.python}: {error.strerror}"
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no word"]
        return {}, f"the head does not answer: {lines[-1][:300]}"
    body = json.loads(done.stdout.splitlines()[-1])
    return (body, "") if isinstance(body, dict) else ({}, "no tables")


def _telling(folder: Path) -> Sequence[str]:
    """Lines of the daemons' logs that explain a stalled job."""
    found = []
    for name in ("raylet.out", "raylet.err", "gcs_server.out"):
        try:
            with (folder / name).open("rb") as stream:
                stream.seek(max(0, (folder / name).stat().st_size - _TAIL_BYTES))
                lines = stream.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        found += [line[:400] for line in lines if _TELLING.search(line)][-_MOST_LINES:]
    return found
