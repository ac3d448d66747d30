"""The executor's settings: each field is a `--submitit-...` option and a profile key."""

from dataclasses import dataclass, field

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase


@dataclass
class ExecutorSettings(ExecutorSettingsBase):  # type: ignore[misc]  # untyped base
    """All times in seconds.

    Raises:
        WorkflowError: a value is out of its range.
    """

    folder: str = field(
        default=".snakemake/submitit",
        metadata={"help": "Folder of job files and logs, on a file system that the nodes share."},
    )
    poll_seconds: float = field(
        default=10.0,
        metadata={"help": "Seconds between two squeue calls; results are files, seen at once."},
    )
    submit_patience: int = field(
        default=600,
        metadata={"help": "Seconds for which a refused sbatch is tried again."},
    )
    requeue_grace: int = field(
        default=300,
        metadata={"help": "Seconds a job may stay NODE_FAIL or PREEMPTED before it counts failed."},
    )
    result_grace: int = field(
        default=60,
        metadata={"help": "Seconds for the result file of an ended job to become visible."},
    )
    array_size: int = field(
        default=1000,
        metadata={"help": "Most jobs in one array; the cluster's MaxArraySize - 1 at most."},
    )
    log_lines: int = field(
        default=30,
        metadata={"help": "Lines of a failed job's log to print; 0 prints none."},
    )
    # A flag's default must be False: Snakemake makes it `store_true`.
    no_reattach: bool = field(
        default=False,
        metadata={"help": "Do not adopt jobs of an earlier snakemake that was killed."},
    )

    def __post_init__(self) -> None:
        if not self.folder:
            raise WorkflowError("--submitit-folder is empty: expected a folder's path")
        for name, least in (("poll_seconds", 0.5), ("array_size", 1), ("log_lines", 0)):
            _at_least(name, getattr(self, name), least)
        for name in ("submit_patience", "requeue_grace", "result_grace"):
            _at_least(name, getattr(self, name), 0)


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        option = f"--submitit-{name.replace('_', '-')}"
        raise WorkflowError(f"{option} {value}: expected at least {least}")


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    # sbatch hands the environment on.
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=0,
    pass_group_args=True,
)
