"""Slurm's programs: in a built environment, with a time limit, and their refusals as errors."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.errors import LaunchError

# A busy controller answers late, a dead one never.
SECONDS = 60.0  # where nothing goes on without the answer
GLANCE_SECONDS = 10.0  # where the rest is told without it

# Which cluster is asked, and who asks it.
_WHICH = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# What else a shell or a job around says would change questions (SQUEUE_STATES, SLURM_CLUSTERS) and
# jobs (SBATCH_ACCOUNT, SLURM_JOB_ID).
_OTHERS = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "SACCT_")


@dataclass(frozen=True)
class ProgramAnswer:
    """What a program printed, and what it complained of; empty where it did as it was asked."""

    text: str
    words: str = ""

    @property
    def said(self) -> str:
        """The first line of its complaint."""
        return self.words.partition("\n")[0]


def environment(around: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables around without those that decide what Slurm is asked or does."""
    kept = {
        name: value
        for name, value in around.items()
        if name in _WHICH or not name.startswith(_OTHERS)
    }
    # ISO 8601, without words such as `Tomorr`.
    return kept | {"SLURM_TIME_FORMAT": "standard"}


def run(command: Sequence[str], *, seconds: float = SECONDS, stdin: str = "") -> ProgramAnswer:
    """Run one of Slurm's programs; one that refuses says so in the answer.

    Raises:
        LaunchError: it is not installed, cannot be run, or did not answer in time.
    """
    import subprocess  # a tenth of the start of who needs no more than names of nodes

    program = command[0]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env=environment(),
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{program} is not installed on this host", hint="run it on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{program} did not answer within {seconds:g} s", hint="scontrol ping"
        ) from error
    except OSError as error:
        raise LaunchError(f"cannot run {program}: {error.strerror or error}") from error
    if not done.returncode:
        return ProgramAnswer(done.stdout)
    # Of an array's task that is not there scontrol speaks on standard output.
    words = done.stderr.strip() or done.stdout.strip()
    return ProgramAnswer(done.stdout, words or f"exit code {done.returncode}")


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
