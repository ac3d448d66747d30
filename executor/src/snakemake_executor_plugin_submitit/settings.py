"""The executor's settings: each field is a `--submitit-...` option and a profile key."""

from dataclasses import asdict, dataclass, field

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
    patience: int = field(
        default=900,
        metadata={
            "help": "Seconds for which Slurm commands are tried again while the controller or the "
            "database is down."
        },
    )
    requeue_grace: int = field(
        default=300,
        metadata={"help": "Seconds a job may stay NODE_FAIL or PREEMPTED before it counts failed."},
    )
    result_grace: int = field(
        default=60,
        metadata={"help": "Seconds for the result file of an ended job to become visible."},
    )
    requeue_limit: int = field(
        default=20,
        metadata={
            "help": "How often a job with `checkpoint_seconds` is requeued after it was warned."
        },
    )
    array_size: int = field(
        default=0,
        metadata={"help": "Most jobs in one array; 0: what the cluster allows."},
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
    follow: bool = field(
        default=False,
        metadata={"help": "Print what running jobs write, each line with its job in front."},
    )

    def __post_init__(self) -> None:
        if not self.folder:
            raise WorkflowError("--submitit-folder is empty: expected a folder's path")
        for name, value in asdict(self).items():
            if isinstance(value, int):
                _at_least(name, value, 0)


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
