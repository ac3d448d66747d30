"""Whether other nodes see a lock that one node holds; some mounts lock only within a node."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from shakedown.core.private import make_folders
from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.checks.files import marker_folder
from shakedown.preflight.checks.visibility import leave_file
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

_POLL_SECONDS = 0.05


def measure(request: ProbeRequest, node: str) -> NodeFacts:
    """The first node locks a file, and the others try to. `failed`: the errno if no lock can be
    taken at all, `taken`: a node got the lock that the first one held, `unheld`: the first one held
    it too late."""
    folder = marker_folder(request)
    make_folders(folder)
    deadline = time.monotonic() + request.limit / 2
    first, *others = request.addresses
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if node == first:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leave_file(folder, "@held", request.token)
            _wait(lambda: all(_left(folder, f"@tried-{other}") for other in others), deadline)
            leave_file(folder, "@released", request.token)
            return {"failed": "", "taken": False, "unheld": False}
        unheld = not _wait(lambda: _left(folder, "@held"), deadline)
        taken = not unheld and _takes(handle)
        # The first node writes this before it releases the lock: then a lock taken was free.
        unheld = unheld or (taken and _left(folder, "@released"))
        leave_file(folder, f"@tried-{node}", request.token)
        return {"failed": "", "taken": taken and not unheld, "unheld": unheld}
    except OSError as error:
        return {"failed": errno.errorcode.get(error.errno or 0, "?"), "taken": False}
    finally:
        os.close(handle)


def _takes(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _left(folder: Path, name: str) -> bool:
    return f"seen-{name}" in os.listdir(folder)


def _wait(condition: Callable[[], bool], deadline: float) -> bool:
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return met


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """Only a warning: runs work without locks, but caches that several nodes write may break."""
    expected = "all nodes see a lock that one holds"
    if facts["failed"]:
        remedy = "mount with locks (Lustre: flock; NFS: lockd), or keep HF_HOME off this mount"
        return CheckJudgement("warn", facts["failed"], expected, "", "environment", remedy)
    if facts["taken"]:
        remedy = "mount with locks across nodes (Lustre: flock instead of localflock)"
        measured = "got a lock that another node holds"
        return CheckJudgement("warn", measured, expected, "", "environment", remedy)
    if facts["unheld"]:
        return CheckJudgement(
            "skip", "the first node held no lock at that time: see `visibility`", expected
        )
    return CheckJudgement("pass", "seen", expected)


LOCKS = Check(
    "locks",
    "warns: the results folder supports no locks (flock), or a node gets one that another holds. "
    "Skipped if the first node's files are not visible in time",
    measure,
    judge,
    limit="half of `--timeout`",
    source="Lustre's localflock; the hub's cache is locked with flock",
)
