"""Slurm's programs, run in a controlled environment with a time limit; and srun's command line."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shakedown.core.errors import LaunchError

# A busy controller answers late, a dead one never.
SECONDS = 60.0  # where nothing can continue without the answer
GLANCE_SECONDS = 10.0  # where the rest can be reported without it

# Which cluster is asked, and as whom.
_WHICH = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# Other variables of the shell or the surrounding job would change queries (SQUEUE_STATES,
# SLURM_CLUSTERS) and jobs (SBATCH_ACCOUNT, SLURM_JOB_ID).
_OTHERS = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "SACCT_")


@dataclass(frozen=True)
class ProgramAnswer:
    """A program's output, and its complaint (empty if it succeeded)."""

    text: str
    words: str = ""

    @property
    def said(self) -> str:
        """The first line of its complaint."""
        return self.words.partition("\n")[0]


def environment(around: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The current environment without the variables that change Slurm's behaviour."""
    kept = {
        name: value
        for name, value in around.items()
        if name in _WHICH or not name.startswith(_OTHERS)
    }
    # ISO 8601, without words such as `Tomorr`.
    return kept | {"SLURM_TIME_FORMAT": "standard"}


def run(command: Sequence[str], *, seconds: float = SECONDS, stdin: str = "") -> ProgramAnswer:
    """Run one of Slurm's programs; a refusal is part of the answer.

    Raises:
        LaunchError: it is not installed, cannot be run, or did not answer in time.
    """
    import subprocess  # slow to import for code that only needs names of nodes

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
    # scontrol reports a missing array task on standard output.
    words = done.stderr.strip() or done.stdout.strip()
    return ProgramAnswer(done.stdout, words or f"exit code {done.returncode}")


# srun passes these on to the step and would refuse it if the job was started with options that
# exclude each other (--mem and --mem-per-cpu).
_UNSET = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_CPU_BIND")


def srun_argv(
    *,
    nodes: Sequence[str],
    tasks: int,
    job_name: str,
    output: Path | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """An srun command line over `nodes` of the current job, for `tasks` in total, in block order.

    Without `output` the tasks' output is part of srun's own.

    The step shares its resources (--overlap), takes more tasks than CPUs (--overcommit) and
    goes on when a task fails (--kill-on-bad-exit=0) or ends before the others (--wait=0): stopping
    is the supervisor's decision, and evidence must be collected first. --export=ALL outranks an
    `sbatch --export=NONE`, and --mem=0 lets the step use all memory of the job.
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
