"""The executor's settings: each field is a `--submitit-...` option and a profile key."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from snakemake_executor_plugin_submitit.values import ResourceError, option

_PREFIX = re.compile(r"[A-Za-z0-9_-]{0,50}")


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
            "help": "Seconds for which Slurm commands are retried while the controller or the "
            "database is down."
        },
    )
    requeue_grace: int = field(
        default=300,
        metadata={
            "help": "Seconds a job may stay NODE_FAIL or PREEMPTED before it counts as failed."
        },
    )
    result_grace: int = field(
        default=60,
        metadata={"help": "Seconds for the result file of an ended job to become visible."},
    )
    requeue_limit: int = field(
        default=20,
        metadata={
            "help": "How often a job with `checkpoint_seconds` is requeued after its warning."
        },
    )
    array_size: int = field(
        default=0,
        metadata={"help": "Most jobs in one array; 0: as many as the cluster allows."},
    )
    log_lines: int = field(
        default=30,
        metadata={"help": "Lines of a failed job's log to print (0 for none)."},
    )
    partition_config: str = field(
        default="",
        metadata={
            "help": "YAML file of partitions and their limits: a job that names no partition gets "
            "the best fit. Default: the variable SNAKEMAKE_SLURM_PARTITIONS."
        },
    )
    qos: str = field(
        default="",
        metadata={"help": "Quality of service of jobs that name none."},
    )
    reservation: str = field(
        default="",
        metadata={"help": "Reservation of jobs that name none."},
    )
    jobname_prefix: str = field(
        default="",
        metadata={"help": "Prefix of the jobs' names: letters, digits, `_` and `-`, at most 50."},
    )
    # A flag's default must be False: Snakemake makes it `store_true`.
    no_requeue: bool = field(
        default=False,
        metadata={
            "help": "Tell Slurm not to requeue jobs that lost their node or were preempted, unless "
            "they request it by `requeue` or `checkpoint_seconds`."
        },
    )
    no_reattach: bool = field(
        default=False,
        metadata={"help": "Do not take over jobs of an earlier snakemake that was killed."},
    )
    follow: str = field(
        default="none",
        metadata={
            "help": "Print the output of running jobs, each line prefixed with its job: of a job "
            "that runs alone (single), of all jobs, or of none.",
            "choices": ["none", "single", "all"],
        },
    )
    efficiency_report: bool = field(
        default=False,
        metadata={
            "help": "At the end print, for each rule, the share of CPUs and memory that its jobs "
            "used. `reportseff` or `seff` show it for each job."
        },
    )
    logdir: str = field(
        default="",
        metadata={
            "help": "Folder of the jobs' logs, by rule and wildcards (default: `logs` in the "
            "job folder)."
        },
    )
    keep_successful_logs: bool = field(
        default=False,
        metadata={"help": "Keep the logs of jobs that succeeded."},
    )
    delete_logfiles_older_than: int = field(
        default=10,
        metadata={"help": "Days for which logs are kept; 0 or less: forever."},
    )

    def __post_init__(self) -> None:
        if not self.folder:
            raise WorkflowError("--submitit-folder is empty: expected a folder's path")
        for name, value in asdict(self).items():
            if isinstance(value, int) and name != "delete_logfiles_older_than":
                _at_least(name, value, 0)
        for name in ("qos", "reservation"):
            _check_option(name, getattr(self, name))
        if not _PREFIX.fullmatch(self.jobname_prefix):
            raise WorkflowError(
                f"--submitit-jobname-prefix {self.jobname_prefix!r}: expected at most 50 letters,"
                " digits, `_` and `-`"
            )

    @property
    def resource_defaults(self) -> dict[str, Any]:
        """Default resources of jobs."""
        found: dict[str, Any] = {"qos": self.qos, "reservation": self.reservation}
        return {**found, "requeue": False} if self.no_requeue else found


def _check_option(name: str, value: str) -> None:
    try:
        option(f"--submitit-{name}", value)
    except ResourceError as error:
        raise WorkflowError(str(error)) from error


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        option = f"--submitit-{name.replace('_', '-')}"
        raise WorkflowError(f"{option} {value}: expected at least {least}")


common_settings = CommonSettings(
    non_local_exec=True,
    # The nodes see the submitting host's files: nothing has to be sent to them.
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    # sbatch hands the environment on.
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
    # A look at the result files costs Slurm nothing, so it may be made at once.
    init_seconds_before_status_checks=0,
    pass_group_args=True,
)
