"""Shared memory: NCCL, gloo, data loaders and vLLM pass tensors through it."""

import os

from shakedown.preflight.check import Check, CheckJudgement
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`free_mb`: free space for shared memory."""
    seen = os.statvfs("/dev/shm")  # noqa: S108
    return {"free_mb": round(seen.f_bavail * seen.f_frsize / 2**20, 1)}


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:
    """Too little shared memory causes bus errors in data loaders, vLLM and NCCL."""
    expected = f">= {want.min_shm_mb:g}"
    if facts["free_mb"] < want.min_shm_mb:
        remedy = "mount /dev/shm larger (containers: --shm-size), or remove stale files there"
        return CheckJudgement("fail", facts["free_mb"], expected, "MB free", "node", remedy)
    return CheckJudgement("pass", facts["free_mb"], expected, "MB free")


SHM = Check(
    "shm",
    "too little space in /dev/shm",
    measure,
    judge,
    health=True,
    limit="`min_shm_mb`, 64 MB",
    source="Docker's default, with which NCCL and data loaders crash with bus errors",
)
