"""The equality of machines: kernel, C library, CPUs that the job may use."""

import os
import platform
from collections.abc import Mapping

from shakedown.preflight.check import Check, CheckJudgement, Fleet, unlike_most
from shakedown.preflight.datatypes import NodeFacts, ProbeRequest
from shakedown.processes.identity import boot_id


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """Nodes with one `boot_id` share a machine (a test cluster)."""
    return {
        "boot_id": boot_id(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        # The CPUs that this process may use: Slurm may have bound it to some of the machine's.
        "cpus": len(os.sched_getaffinity(0)),
    }


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """Warn about a node that differs from most."""
    rows = {
        node: {name: facts[name] for name in ("kernel", "libc", "cpus")}
        for node, facts in fleet.facts("machine").items()
    }
    remedy = "update the node, or ask for as many CPUs on each: --cpus-per-task, --exclusive"
    return {
        node: CheckJudgement("warn", other, "as on most nodes", "", "environment", remedy)
        if other
        else CheckJudgement("pass", rows[node], "as on most nodes")
        for node, other in unlike_most(rows).items()
    }


MACHINE = Check(
    "machine",
    "warns: kernel, C library or number of usable CPUs differ from most nodes",
    measure,
    compare=compare,
    health=True,
    limit="equal",
    source="a build of torch or NCCL that works on one node fails on another",
)
