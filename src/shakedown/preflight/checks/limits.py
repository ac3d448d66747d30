"""Resource limits of the job's processes."""

import resource

from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

MIN_NOFILE = 4096  # twice the about 2 descriptors each of 512 concurrent episodes
MIN_NPROC = 4096
MIN_MEMLOCK_MB = 16 * 1024  # AWS's health check warns below 16 GiB: RDMA pins its buffers


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """Soft limits; null is unlimited. memlock in MB."""
    memlock = _soft(resource.RLIMIT_MEMLOCK)
    return {
        "nofile": _soft(resource.RLIMIT_NOFILE),
        "nproc": _soft(resource.RLIMIT_NPROC),
        "memlock_mb": memlock if memlock is None else memlock // 2**20,
    }


def _soft(kind: int) -> int | None:
    value = resource.getrlimit(kind)[0]
    return None if value == resource.RLIM_INFINITY else value


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:
    """Open files and processes; with GPUs also locked memory, for RDMA."""
    least = {"nofile": MIN_NOFILE, "nproc": MIN_NPROC}
    if want.gpus:
        least["memlock_mb"] = MIN_MEMLOCK_MB
    low = {n: facts[n] for n, most in least.items() if facts[n] is not None and facts[n] < most}
    if not low:
        return CheckJudgement("pass", {name: facts[name] for name in least})
    # 1024 is Linux's usual default.
    return CheckJudgement(
        "fail" if low.get("nofile", 1024) < 1024 else "warn",
        low,
        {name: f">= {least[name]}" for name in low},
        remedy="raise the soft limit (ulimit) in the job, or the node's limits for Slurm jobs",
    )


LIMITS = Check(
    "limits",
    "warns: few open files, processes or, with GPUs, little lockable memory; fails: hardly any "
    "open files",
    measure,
    judge,
    limit="4096 files, 4096 processes, 16 GiB; fails below 1024 files",
    source="512 episodes of an agent check; AWS's health check (memlock); Linux's default",
)
