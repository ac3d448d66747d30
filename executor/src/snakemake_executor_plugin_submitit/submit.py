"""Submission: jobs of equal parameters as one sbatch through submitit."""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import Job, SlurmExecutor

from snakemake_executor_plugin_submitit.node import run_command
from snakemake_executor_plugin_submitit.resources import Parameters
from snakemake_executor_plugin_submitit.slurm import outside_of_any_job

_NAME_LENGTH = 60
# sbatch's words for an array of more tasks than the cluster allows.
_ARRAY_TOO_LARGE = "invalid job array specification"


@dataclass(frozen=True)
class Batch:
    """Jobs with equal Slurm parameters. `work`: for each its command and its result file.

    `requeue_limit`: how often a job that was warned of its end may requeue itself.
    """

    name: str
    tag: str
    parameters: Parameters
    work: Sequence[tuple[str, Path]]
    requeue_limit: int = 0


def submit(batch: Batch, folder: Path) -> list[str]:
    """One sbatch; the job ids in the order of `batch.work`, `main_index` in an array.

    Raises:
        FailedJobError, FailedSubmissionError: sbatch failed; the message is its standard error.
        RuntimeError: Slurm's programs are not installed.
    """
    # exec: the batch step is the Python process itself, so Slurm's signals and its exit code
    # pass through no shell.
    executor = SlurmExecutor(folder=folder, python=f"exec {shlex.quote(sys.executable)}")
    executor.update_parameters(**_submitit_parameters(batch))
    commands = [command for command, _ in batch.work]
    results = [str(path) for _, path in batch.work]
    limits = [batch.requeue_limit] * len(batch.work)
    with outside_of_any_job():
        jobs = executor.map_array(run_command, commands, results, limits)
    _keep_private(jobs)
    return [job.job_id for job in jobs]


def is_array_too_large(words: str) -> bool:
    """Whether sbatch refused because of the number of tasks."""
    return _ARRAY_TOO_LARGE in words.lower()


def job_name(names: Sequence[str], ends: str) -> str:
    """A name for squeue that ends in this run's mark and holds nothing but plain letters."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", "+".join(dict.fromkeys(names)))
    return plain[: _NAME_LENGTH - len(ends)] + ends


def _submitit_parameters(batch: Batch) -> dict[str, Any]:
    own = dict(batch.parameters)
    # Slurm may warn before the batch process listens: that must not end it.
    setup = ["trap '' USR2"] if batch.requeue_limit else None
    extra = {"requeue": True, **own.pop("additional_parameters", {})}
    return {
        # Without a time the partition's own limit holds, as for plain sbatch.
        "time": None,
        **own,
        "job_name": batch.name,
        "comment": batch.tag,
        # The command runs once, in the batch step on the first node; it may srun over all.
        "use_srun": False,
        "stderr_to_stdout": True,
        "array_parallelism": len(batch.work),
        # No warning signal, unless `checkpoint_seconds` asks for one in `extra`.
        "signal_delay_s": 0,
        # Submitit's own; a cluster that tracks keys may refuse one that it does not know.
        "wckey": None,
        "setup": setup,
        "additional_parameters": extra,
    }


def _keep_private(jobs: Sequence[Job[Any]]) -> None:
    """The folder is closed to others already; this holds when somebody opens it."""
    for job in jobs:
        for path in (job.paths.submitted_pickle, job.paths.submission_file):
            with suppress(OSError):  # an array has one submission file
                path.chmod(0o600)
