"""A private Slurm cluster on one machine: munge, slurmctld, slurmd, optional accounting.

Everything lives in one folder, listens on 127.0.0.1 only and is gone after `stop`.
Standard library only, so that it runs before anything is installed.
"""

from private_slurm import control
from private_slurm.cluster import Cluster, load, start, status, stop
from private_slurm.config import ACCOUNTING, Plan
from private_slurm.errors import ClusterError

__all__ = [
    "ACCOUNTING",
    "Cluster",
    "ClusterError",
    "Plan",
    "control",
    "load",
    "start",
    "status",
    "stop",
]
