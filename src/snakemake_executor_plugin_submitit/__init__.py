"""Snakemake -> submitit -> Slurm: `snakemake --executor submitit`.

Ready jobs with equal resources go out as one array; results come back as files; Slurm is asked
by one squeue a poll. Knows nothing of the workflow that it runs. See docs/executor.md.
"""

from snakemake_executor_plugin_submitit.executor import Executor
from snakemake_executor_plugin_submitit.settings import ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
