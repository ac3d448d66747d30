"""A job on its way: from Snakemake's object to what is submitted and watched."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit.journal import Entry
from snakemake_executor_plugin_submitit.reattach import identity
from snakemake_executor_plugin_submitit.resources import (
    Parameters,
    checkpoint_seconds,
    slurm_parameters,
)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready for sbatch. `exclude_file`: None when it names none."""

    job: Any
    key: str
    fingerprint: str
    command: str
    parameters: Parameters
    checkpoints: bool
    exclude_file: Path | None


@dataclass
class Watch:
    """A submitted job under watch; `unclear_since` is monotonic seconds."""

    entry: Entry
    unclear_since: float | None = None


def prepare(job: Any, command: str, declared: Collection[str]) -> Prepared:
    """Check a job's resources and note what is needed to submit it.

    Raises:
        ResourceError: a resource that Slurm cannot be given.
    """
    resources = dict(job.resources.items())
    parameters = slurm_parameters(resources, _threads(job), declared)
    exclude_file = resources.get("exclude_file")
    return Prepared(
        job,
        *identity(job),
        command,
        parameters,
        checkpoints=checkpoint_seconds(resources) > 0,
        exclude_file=Path(str(exclude_file)) if exclude_file else None,
    )


def label(job: Any, entry: Entry) -> str:
    """How a followed log's lines name their job."""
    wildcards = () if job.is_group() else job.wildcards_dict.values()
    return shlex.join([str(job.name), *map(str, wildcards), entry.job_id])


def _threads(job: Any) -> int:
    """A group's `_cores` is what its jobs need at once."""
    return int(job.resources.get("_cores", 1)) if job.is_group() else int(job.threads)
