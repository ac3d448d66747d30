"""Signals the ranks of a Slurm job on one node: `python -m ...rank_signal JOB SIGNAL`.

A launcher ends its workers at once on most signals, and srun its tasks: only the ranks get them.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence

from shakedown.monitor.collect import Target, from_job, from_processes
from shakedown.processes.guard import look, send_one
from shakedown.slurm.client import srun_argv


def signal_ranks(pids: Collection[int], number: signal.Signals) -> None:
    """Signal those of these processes that are ranks; all of them where none is known.

    With Ray its driver: a worker that ends takes its actor with it.
    """
    targets = from_processes(pids)
    drivers = [target.pid for target in targets if not target.of_ray]
    with_ray = len(drivers) < len(targets)
    _send(drivers if with_ray else _ranks(targets) or pids, number)


def signal_other_nodes(nodes: Sequence[str], number: signal.Signals) -> "subprocess.Popen[bytes]":
    """Start a step that signals the ranks on the other nodes of this job; it ends by itself."""
    command = [sys.executable, "-P", "-m", __name__, os.environ["SLURM_JOB_ID"], number.name]
    step = srun_argv(
        nodes=nodes, tasks=len(nodes), job_name="signal", more=["--gres=none", "--time=1"]
    )
    return subprocess.Popen([*step, *command], stdin=subprocess.DEVNULL)


def _send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        process = look(pid)
        # It may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_one(pid, process.started if process else 0, number)


def _ranks(targets: Sequence[Target]) -> list[int]:
    return [target.pid for target in targets if target.rank is not None and not target.of_ray]


if __name__ == "__main__":
    _send(_ranks(from_job(sys.argv[1])), signal.Signals[sys.argv[2]])
