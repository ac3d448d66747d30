"""Submission: jobs of equal parameters as one sbatch through submitit, with patience."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from snakemake_executor_plugin_submitit.node import run_command
from snakemake_executor_plugin_submitit.resources import Parameters
from snakemake_executor_plugin_submitit.slurm import SlurmError, outside_of_any_job

# sbatch's words for a controller that is busy, restarting or out of reach, or a full queue.
_TRANSIENT = (
    "unable to contact slurm controller",
    "slurm controller not responding",
    "temporarily unable to accept job",
    "resource temporarily unavailable",
    "standby mode",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unexpected message received",
    "maxsubmitjob",
    "does not answer",
)
_FIRST_DELAY, _LONGEST_DELAY = 2.0, 60.0
_NAME_LENGTH = 60


class SubmitError(RuntimeError):
    """sbatch refused for good, or for longer than the patience; the message has its words."""


@dataclass(frozen=True)
class Batch:
    """Jobs with equal Slurm parameters. `work`: for each its command and its result file."""

    name: str
    tag: str
    parameters: Parameters
    work: Sequence[tuple[str, Path]]


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
    with outside_of_any_job():
        jobs = executor.map_array(run_command, commands, results)
    return [job.job_id for job in jobs]


def _submitit_parameters(batch: Batch) -> dict[str, Any]:
    own = dict(batch.parameters)
    extra = {"requeue": True, **own.pop("additional_parameters", {})}
    return {
        # Without a time the partition's own limit holds, as for plain sbatch.
        "time": None,
        **own,
        "job_name": batch.name[:_NAME_LENGTH],
        "comment": batch.tag,
        # The command runs once, in the batch step on the first node; it may srun over all.
        "use_srun": False,
        "stderr_to_stdout": True,
        "array_parallelism": len(batch.work),
        # No warning signal: USR2 would end the ranks of a stage before its time limit does.
        "signal_delay_s": 0,
        # Submitit's own; a cluster that tracks keys may refuse one that it does not know.
        "wckey": None,
        "additional_parameters": extra,
    }


def is_transient(message: str) -> bool:
    """Whether sbatch's or squeue's words say that the same request may succeed later."""
    return any(words in message.lower() for words in _TRANSIENT)


def with_patience(
    attempt: Callable[[], list[str]],
    *,
    patience: float,
    clean_up: Callable[[], None],
    on_retry: Callable[[str, float], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Call `attempt` until it succeeds, with growing pauses, for `patience` seconds at most.

    Before each further attempt `clean_up` runs: a call that timed out may have come through.
    `on_retry` is told the error's words and the pause in seconds.

    Raises:
        SubmitError: a lasting refusal, or the patience is over.
    """
    deadline = clock() + patience
    delay = _FIRST_DELAY
    again = False
    while True:
        try:
            if again:
                clean_up()
            return attempt()
        except (FailedJobError, FailedSubmissionError, SlurmError, OSError, RuntimeError) as error:
            words = str(error).strip() or type(error).__name__
            if not is_transient(words) or clock() + delay > deadline:
                raise SubmitError(words) from error
        on_retry(words, delay)
        sleep(delay)
        delay = min(delay * 2, _LONGEST_DELAY)
        again = True
