"""The machine itself: identity, clock, memory, /dev/shm, limits."""

import os
import platform
import resource
import socket
import time
from pathlib import Path

import psutil

from shakedown.preflight.model import Facts, ProbeRequest, has_fault

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock(request: ProbeRequest, node: str) -> Facts:
    """`now`: seconds since the epoch."""
    ahead = 120.0 if has_fault(request.faults, "clock_skew", node) else 0.0
    return {"now": time.time() + ahead}


def host(request: ProbeRequest, node: str) -> Facts:  # noqa: ARG001
    """Identity. Nodes with one `boot_id` share a machine (a test cluster)."""
    return {
        "hostname": socket.gethostname(),
        "boot_id": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        # Those that this process may run on: Slurm may have bound it to some of the machine's.
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "uptime_hours": round((time.time() - psutil.boot_time()) / 3600, 1),
        "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
    }


def memory(request: ProbeRequest, node: str) -> Facts:  # noqa: ARG001
    """Main memory in MB; `limit_mb` is the control group's limit, if any."""
    seen = psutil.virtual_memory()
    return {
        "total_mb": seen.total // 2**20,
        "available_mb": seen.available // 2**20,
        "limit_mb": _cgroup_limit_mb(),
    }


def _cgroup_limit_mb() -> int | None:
    """The tightest memory.max on the way from this process's group (cgroup v2) to the root."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    # The line of cgroup v2: `0::/system.slice/slurmstepd.scope/job_7`.
    relative = next((line[3:] for line in own if line.startswith("0::")), "/")
    folder = Path("/sys/fs/cgroup") / relative.lstrip("/")
    limits_found = []
    for level in (folder, *folder.parents):
        file = level / "memory.max"
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            limits_found.append(int(text) // 2**20)
    return min(limits_found, default=None)


def shm(request: ProbeRequest, node: str) -> Facts:
    """Shared memory in MB; NCCL, gloo, data loaders and vLLM pass tensors through it."""
    if has_fault(request.faults, "low_shm", node):
        return {"total_mb": 1.0, "free_mb": 1.0}
    seen = os.statvfs("/dev/shm")  # noqa: S108
    return {
        "total_mb": round(seen.f_blocks * seen.f_frsize / 2**20, 1),
        "free_mb": round(seen.f_bavail * seen.f_frsize / 2**20, 1),
    }


def limits(request: ProbeRequest, node: str) -> Facts:
    """Resource limits as [soft, hard]; null is unlimited. memlock in MB."""
    nofile = _limit(resource.RLIMIT_NOFILE)
    if has_fault(request.faults, "low_limits", node):
        nofile = [256, 256]
    memlock = [value // 2**20 if value else value for value in _limit(resource.RLIMIT_MEMLOCK)]
    return {"nofile": nofile, "nproc": _limit(resource.RLIMIT_NPROC), "memlock_mb": memlock}


def _limit(kind: int) -> list[int | None]:
    return [
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)
    ]
