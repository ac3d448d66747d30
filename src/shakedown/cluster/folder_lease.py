"""A folder's lease on a cluster: Slurm tells whether the job of a holder elsewhere has ended."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from shakedown.core import lease
from shakedown.core.errors import LaunchError
from shakedown.slurm.client import SECONDS
from shakedown.slurm.jobs import ask


def hold(folder: Path, what: str, *, wait: bool = False) -> AbstractContextManager[lease.Fence]:
    """As `core.lease.hold`."""
    return lease.hold(folder, what, job_ended=job_ended, wait=wait)


def holder_of(folder: Path) -> lease.Holder | None:
    """As `core.lease.holder_of`."""
    return lease.holder_of(folder, job_ended=job_ended)


def job_ended(job: str, cluster: str) -> bool:
    """Whether Slurm says that the job has ended; no answer or an unknown cluster prove nothing."""
    here = os.environ.get("SLURM_CLUSTER_NAME", "")
    try:
        # The same number on another cluster is another job.
        found = ask([job], cluster="" if cluster == here else cluster, seconds=SECONDS)
    except (LaunchError, ValueError):
        return False
    return bool(cluster) and (job not in found or found[job].ended)
