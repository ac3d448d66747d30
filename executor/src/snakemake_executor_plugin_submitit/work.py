"""The preparation of a job, from Snakemake's object to the submission."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_submitit.identity import JobIdentity, identify
from snakemake_executor_plugin_submitit.logs import file_name
from snakemake_executor_plugin_submitit.partitions import Partition, choose
from snakemake_executor_plugin_submitit.request import doubtful_names, request
from snakemake_executor_plugin_submitit.resources import (
    Parameters,
    checkpoint_seconds,
    slurm_parameters,
)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready for sbatch.

    `label`: its rule and wildcards; `log_folder`: where its log belongs, below that of all logs.
    `exclude_file`, `node_file`: None when it names none. `accounts`: those to choose from, none
    when the job names none. `warnings`: to be said once.
    """

    job: Any
    identity: JobIdentity
    label: str
    log_folder: Path
    command: str
    parameters: Parameters
    checkpoints: bool
    exclude_file: Path | None
    node_file: Path | None = None
    accounts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def prepare(
    job: Any,
    command: str,
    defaults: Mapping[str, Any] | None = None,
    partitions: tuple[Partition, ...] = (),
) -> Prepared:
    """Check a job's resources, choose its partition and note what is needed to submit it.

    Args:
        job: Snakemake's object.
        command: what the job runs.
        defaults: resources for jobs that do not set them.
        partitions: those to choose from for a job that names none.

    Raises:
        ResourceError: a resource that Slurm cannot be given.
    """
    resources = dict(job.resources.items())
    asked = request(resources, _threads(job), defaults)
    parameters = slurm_parameters(asked)
    warnings = [*doubtful_names(resources).values()]
    if partitions and "partition" not in parameters:
        partition, reasons = choose(partitions, asked)
        if partition:
            parameters["partition"] = partition
        else:
            warnings.append(f"{job.name}: no partition fits ({reasons}); Slurm's default is used")
    exclude_file, node_file = (asked.resources.get(f"{use}_file") for use in ("exclude", "node"))
    return Prepared(
        job,
        identify(job),
        label(job),
        log_folder(job),
        command,
        parameters,
        checkpoints=checkpoint_seconds(asked) > 0,
        exclude_file=Path(exclude_file) if exclude_file else None,
        node_file=Path(node_file) if node_file else None,
        accounts=asked.accounts,
        warnings=tuple(warnings),
    )


def label(job: Any) -> str:
    """A job's rule and wildcards, for a person: `align sample=a lane=2`."""
    wildcards = {} if job.is_group() else dict(job.wildcards_dict)
    return " ".join([str(job.name), *(f"{name}={value}" for name, value in wildcards.items())])


def log_folder(job: Any) -> Path:
    """Where a job's log belongs: `rule_align/a_2`, as the names are with other executors."""
    if job.is_group():
        return Path(file_name(f"group_{job.name}"))
    folder = Path(file_name(f"rule_{job.name}"))
    values = "_".join(map(str, dict(job.wildcards_dict).values()))
    return folder / file_name(values) if values else folder


def _threads(job: Any) -> int:
    """A group's `_cores` is what its jobs need at once."""
    return int(job.resources.get("_cores", 1)) if job.is_group() else int(job.threads)
