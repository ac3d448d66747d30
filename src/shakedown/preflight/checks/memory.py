"""Main memory."""

from pathlib import Path

import psutil

from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest

MIN_FREE = 0.1  # share of the memory that the job may use


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """Main memory in MB; `limit_mb` is the control group's limit, if any."""
    seen = psutil.virtual_memory()
    return {
        "total_mb": seen.total // 2**20,
        "available_mb": seen.available // 2**20,
        "limit_mb": _cgroup_limit_mb(),
    }


def _cgroup_limit_mb() -> int | None:
    """The lowest memory.max from this process's group (cgroup v2) up to the root."""
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


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """Warn if little is available: other processes are left on the node."""
    total = facts["limit_mb"] or facts["total_mb"]
    # The kernel counts the machine's available memory, whatever the control group allows.
    free = min(facts["available_mb"], total)
    least = round(total * MIN_FREE)
    if free < least:
        return CheckJudgement(
            "warn", free, f">= {least}", "MB", "node", "look for leftover processes"
        )
    return CheckJudgement("pass", free, f">= {least}", "MB")


MEMORY = Check(
    "memory",
    "warns: little free memory, as when processes of an earlier job are left",
    measure,
    judge,
    health=True,
    limit="10 % of the control group's limit, or of the machine",
    source="ours",
)
