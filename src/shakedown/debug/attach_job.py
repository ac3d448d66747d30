"""The debugger settings of a Slurm job's processes, read on its nodes by a step of the job: their
folders of paused processes, and the Ray debugger that they use.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from shakedown.cluster.nodes import free_port
from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.debug.debug_settings import FOLDER
from shakedown.slurm.client import run, srun_argv
from shakedown.slurm.hostlist import node_name
from shakedown.slurm.jobs import Job
from shakedown.slurm.records import describe, parts_of

_MARK = "shakedown-debug "  # prefix of our line, as a node's shell may print others
# https://docs.ray.io/en/latest/ray-observability/ray-distributed-debugger.html
RAY_DASHBOARD_PORT = 8265


@dataclass(frozen=True)
class DebuggedJob:
    """A running job. `nodes`: in Slurm's order, the first of them being Ray's head by convention;
    `ray_debug`: the value of RAY_DEBUG in its processes."""

    job_id: str
    nodes: tuple[str, ...]
    folders: tuple[Path, ...]
    ray_debug: frozenset[str]


def read_job(job_id: str) -> DebuggedJob:
    """Ask a running Slurm job.

    Raises:
        UsageError: no such job is running.
        CannotJudgeError: Slurm's programs are missing, or the step failed.
    """
    described, text, lost = describe(job_id)
    if not described and lost and "Invalid job id" not in lost:
        raise CannotJudgeError(lost, hint="squeue --me")
    # The first component of a heterogeneous job.
    state = Job(described.get("JobState", ""))
    nodes = list(parts_of(text)[0].nodes) if state.takes_steps else []
    if not nodes:
        raise UsageError(f"Slurm job {job_id} is not running", hint="squeue --me")
    step = srun_argv(
        nodes=nodes,
        tasks=len(nodes),
        job_name="debug",
        more=[f"--jobid={job_id}", "--gres=none", "--quit-on-interrupt"],
    )
    answer = run([*step, sys.executable, "-P", "-m", "shakedown.debug.attach_job", job_id])
    if answer.said:
        raise CannotJudgeError(f"srun in job {job_id}: {answer.said[:300]}", hint="squeue --me")
    folders: set[str] = set()
    ray: set[str] = set()
    for line in answer.text.splitlines():
        if line.startswith(_MARK):
            found = json.loads(line.removeprefix(_MARK))
            folders |= set(found["folders"])
            ray |= set(found["ray_debug"])
    return DebuggedJob(job_id, tuple(nodes), tuple(map(Path, sorted(folders))), frozenset(ray))


def ray_lines(job: DebuggedJob, port: int, user_port: int | None = None) -> list[str]:
    """How VS Code's Ray extension reaches the job's dashboard, and what keeps actors from
    stopping."""
    here = user_port or free_port()
    lines = [
        f"ssh -N -L 127.0.0.1:{here}:127.0.0.1:{port} {job.nodes[0]}",
        f"in VS Code's Ray extension: Add Cluster, 127.0.0.1:{here}",
    ]
    if "legacy" in job.ray_debug:
        lines.append(
            "RAY_DEBUG=legacy is set in the job: its actors stop in Ray's old debugger, which "
            "VS Code cannot use; restart the job without that variable"
        )
    return lines


def of_processes(
    job_id: str, node: str, environments: Iterable[Mapping[str, str]]
) -> dict[str, list[str]]:
    """Debugger settings in the environments of a job's processes on this node."""
    folders, ray = set(), set()
    for environment in environments:
        if environment.get("SLURM_JOB_ID") == job_id and _on(node, environment):
            folders.add(environment.get(FOLDER, ""))
            ray.add(environment.get("RAY_DEBUG", ""))
    return {"folders": sorted(folders - {""}), "ray_debug": sorted(ray - {""})}


def _on(node: str, environment: Mapping[str, str]) -> bool:
    # Slurm nodes that share a host see each other's processes.
    return environment.get("SLURMD_NODENAME", node) == node


def _environments() -> Iterable[Mapping[str, str]]:
    for process in psutil.process_iter():
        try:
            yield process.environ()
        except (psutil.Error, OSError):  # another user's, or gone
            continue


def main() -> None:
    """Print the settings of this node's processes."""
    found = of_processes(sys.argv[1], node_name(), _environments())
    print(f"{_MARK}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
