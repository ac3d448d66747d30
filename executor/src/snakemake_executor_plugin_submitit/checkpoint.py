"""On the node: passing on Slurm's warning, and putting the job back into the queue.

Before a time limit Slurm warns the batch process alone (`--signal=B:USR2@SECONDS`). The warning
is passed to those of the command's processes that handle it; others would die of it.
"""

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.patience import GaveUpError, with_patience

# scontrol's message for a job that is already waiting to run again.
_IS_REQUEUED = "job is pending execution"


class CommandProcess(NamedTuple):
    """A process. `started`, in clock ticks since boot, tells it from a later one of its number."""

    pid: int
    started: int


def descendants(root: int) -> set[CommandProcess]:
    """The living processes below `root`, without `root`; a zombie counts as ended."""
    parents: dict[int, list[CommandProcess]] = {}
    for process, parent in _processes():
        parents.setdefault(parent, []).append(process)
    found: set[CommandProcess] = set()
    open_pids = [root]
    while open_pids:
        for process in parents.get(open_pids.pop(), []):
            found.add(process)
            open_pids.append(process.pid)
    return found


def _processes() -> Iterator[tuple[CommandProcess, int]]:
    """Every living process and its parent's pid. A zombie's children belong to another parent."""
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else None
        if fields is not None and fields[0] not in "ZX":
            yield CommandProcess(int(name), int(fields[19])), int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """State, parent, ... and, as the 20th, the start; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            # After the program's name, which may hold anything.
            return stream.read().rpartition(")")[2].split()
    except OSError:  # ended between the listing and the read
        return None


def send(process: CommandProcess, signum: int) -> None:
    """Signal this process, and not a later one with its number.

    A process that has ended, or that runs as another user (sudo), is skipped.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # before Linux 5.3, or no descriptor is left
        handle = -1
    try:
        # Looked at while the handle is held: what it stands for is this process or none.
        fields = _stat(process.pid)
        if fields is None or int(fields[19]) != process.started:
            return
        with suppress(ProcessLookupError, PermissionError):
            if handle < 0:
                os.kill(process.pid, signum)
            else:
                signal.pidfd_send_signal(handle, signum)
    finally:
        if handle >= 0:
            os.close(handle)


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal; False when it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
            caught = next(line for line in stream if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def own_job(environ: Mapping[str, str]) -> str:
    """scontrol's id of this job or array task; empty outside Slurm."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID", "")


def restarts(environ: Mapping[str, str]) -> int:
    """How often Slurm has requeued this job; it sets the variable from the first time on."""
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def requeue(job: str, pause: Callable[[float], None]) -> str:
    """Put the job back into the queue; retried while the controller is down.

    Args:
        job: id of this job or array task.
        pause: sleeps for seconds; raises when there is no time left to go on.

    Returns:
        Empty when Slurm accepted it, else why not, in its words.
    """
    try:
        with_patience(
            lambda: slurm.run(["scontrol", "requeue", job]),
            patience=math.inf,
            on_retry=lambda words, seconds: print(
                f"requeue: {words}; trying again in {seconds:g} s", flush=True
            ),
            sleep=pause,
        )
    except GaveUpError as error:
        # An earlier call succeeded, although its answer was lost.
        return "" if _IS_REQUEUED in str(error).lower() else str(error)
    return ""
