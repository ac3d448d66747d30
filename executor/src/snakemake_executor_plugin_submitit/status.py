"""The judgement of a job from its result file and Slurm's state. Pure.

Slurm outranks a failure on file: a job that Slurm has requeued is running again, whatever its
interrupted attempt wrote. A success on file stands: the command checked its own outputs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from snakemake_executor_plugin_submitit.node import JobResult
from snakemake_executor_plugin_submitit.slurm import JobState

JobOutcome = Literal["running", "succeeded", "failed", "unclear"]
Patience = Literal["none", "requeue", "result"]

# Slurm's own doing; with JobRequeue=1 the job is PENDING again soon.
INTERRUPTED = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"})

_MEANING: Mapping[str, str] = {
    "TIMEOUT": "it reached its time limit; give the rule more `runtime` (minutes)",
    "OUT_OF_MEMORY": "it used more memory than it asked for; give the rule more `mem_mb`",
    "CANCELLED": "somebody or Slurm cancelled it",
    "DEADLINE": "it could not end before its deadline",
    "NODE_FAIL": "its node was lost and Slurm did not requeue it",
    "PREEMPTED": "another job took its place and Slurm did not requeue it",
    "BOOT_FAIL": "its node did not boot",
    "COMPLETED": "Slurm saw it succeed, but no result file appeared: is the folder shared?",
}

# `slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch.` and
# `slurmstepd: error: StepId=7.batch exceeded memory limit (300 > 200), being killed`. A job's own
# words about memory do not begin with the name of one of Slurm's programs.
_OVER_MEMORY = re.compile(
    r"^(?:slurmstepd|slurmd|srun)\S{0,80}: .{0,200}?(?:exceeded .{0,40}?memory limit|oom.kill)",
    re.I,
)


@dataclass(frozen=True)
class JobJudgement:
    """`unclear` becomes `failed`, for `reason`, when it lasts longer than `patience` names."""

    outcome: JobOutcome
    reason: str = ""
    patience: Patience = "none"


def judge(result: JobResult | None, job: JobState | None) -> JobJudgement:
    """Judge one job.

    Args:
        result: what the node wrote, if anything.
        job: Slurm's state; None if Slurm answered but does not know the job.
    """
    if result is not None and result.exit_code == 0:
        return JobJudgement("succeeded")
    if job is None:
        return _forgotten(result)
    if not job.has_ended:
        return JobJudgement("running")
    reason = _reason(job, result)
    if job.state in INTERRUPTED:
        return JobJudgement("unclear", reason, "requeue")
    if job.state == "COMPLETED":
        return JobJudgement("unclear", reason, "result")
    return JobJudgement("failed", reason)


def _forgotten(result: JobResult | None) -> JobJudgement:
    if result is not None:
        return JobJudgement("failed", f"{_code(result)} on {result.host}")
    return JobJudgement("unclear", "Slurm no longer knows it and no result file appeared", "result")


def _reason(job: JobState, result: JobResult | None) -> str:
    parts = [job.state]
    if job.reason not in ("", "None", job.state):
        parts.append(f"reason {job.reason}")
    if result is not None:
        parts.append(_code(result))
    if job.nodes not in ("", "(null)"):
        parts.append(f"on {job.nodes}")
    meaning = _MEANING.get(job.state)
    return ", ".join(parts) + (f": {meaning}" if meaning else "")


def _code(result: JobResult) -> str:
    return f"exit code {result.exit_code}" + (f" ({result.note})" if result.note else "")


def memory_remark(reason: str, lines: Sequence[str]) -> str:
    """A remark on memory from the log's end, if Slurm's state names no cause.

    Slurm's memory poller (JobAcctGatherParams=OverMemoryKill) leaves FAILED, exit code 0:9; a
    step killed by the kernel leaves slurmstepd's line about oom_kill events.
    """
    if reason.startswith("OUT_OF_MEMORY") or not any(map(_OVER_MEMORY.search, lines)):
        return ""
    return "; Slurm's line in the log says that it exceeded its memory: give it more `mem_mb`"


def failure_message(job_id: str, reason: str, log: str, lines: list[str]) -> str:
    """The message about a failed job: Slurm's reason and the end of its log."""
    message = f"Slurm job {job_id} failed: {reason}"
    if not lines:
        return f"{message}\nlog: {log}\n"
    quoted = "\n".join(f"  | {line}" for line in lines)
    return f"{message}\nend of {log}:\n{quoted}\n"


def failure_line(label: str, job_id: str, reason: str, log: str) -> str:
    """A failed job in one line: rule and wildcards, Slurm's id, reason, log."""
    return f"failed: {label}, Slurm job {job_id}: {reason}; log {log}"
