"""A Snakemake executor for Slurm that submits through submitit; see docs/further.md.

Names that Snakemake looks up are imported on demand, as a node needs only `node`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from snakemake_executor_plugin_submitit.executor import Executor
    from snakemake_executor_plugin_submitit.settings import ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]

_ROOMS = {"Executor": "executor", "ExecutorSettings": "settings", "common_settings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
