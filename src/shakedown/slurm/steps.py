"""Steps of a Slurm job: srun's command line."""

from collections.abc import Sequence
from pathlib import Path

# One line of srun gives every task the same variables; these would make it refuse the step
# when the job was started with options that exclude each other (--mem and --mem-per-cpu).
_UNSET = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_CPU_BIND")


def srun_argv(
    *,
    nodes: Sequence[str],
    tasks: int,
    job_name: str,
    output: Path | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """An srun command line over `nodes` inside the current job, `tasks` in all, block order.

    Without `output` the tasks' output comes back through srun's own.

    The step shares its resources (--overlap), takes more tasks than CPUs (--overcommit) and
    goes on when a task fails (--kill-on-bad-exit=0) or ends before the others (--wait=0): who stops
    whom is the supervisor's decision, and evidence must be collected first. --export=ALL outranks
    an `sbatch --export=NONE`, and --mem=0 lets the step use all memory of the job.
    """
    return [
        "env",
        *(f"--unset={name}" for name in _UNSET),
        "srun",
        "--overlap",
        "--overcommit",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks // len(nodes)}",
        "--distribution=block",
        "--cpu-bind=none",
        "--mem=0",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--open-mode=append",
        f"--job-name={job_name}",
        *([f"--output={output}"] if output else []),
        *more,
    ]
