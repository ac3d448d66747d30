"""Sources that are asked once per host: one row each. An absent one is noted, never missed."""

import importlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shakedown.slurm.hostlist import node_name
from shakedown.slurm.records import show

Query = Callable[[], tuple[str, str, str]]
_GPUS_SCHEMA = "shakedown/gpus/1"


def _slurm() -> tuple[str, str, str]:
    """Slurm's own view of the job and this node.

    Raises:
        LookupError: not inside a Slurm job, or another task of the step asks.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise LookupError("not inside a Slurm job")
    if os.environ.get("SLURM_PROCID", "0") != "0":
        raise LookupError("asked by the first task of the step")
    return "slurm.txt", *show(("job", job), ("node", node_name()))


def query_gpus() -> tuple[str, str, str]:
    """How busy the GPUs are, by NVML: (suffix of the file, text, what was missed).

    One row per GPU, in percent, watts and bytes. One that spins in a collective is busy as well.

    Raises:
        LookupError: pynvml is not installed, or there is no driver.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise LookupError("pynvml is not installed") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise LookupError(f"no NVML: {error}") from error
    try:
        count = nvml.nvmlDeviceGetCount()
        rows, missed = [], []
        for index in range(count):
            try:
                rows.append(_row(nvml, index))
            except nvml.NVMLError as error:  # one lost GPU is evidence, too
                rows.append({"index": index, "error": str(error)})
                missed.append(f"GPU {index}: {error}")
    finally:
        nvml.nvmlShutdown()
    body = {"schema": _GPUS_SCHEMA, "host": socket.gethostname(), "gpus": rows}
    return "gpus.json", json.dumps(body, indent=2) + "\n", "; ".join(missed)


def _row(nvml: Any, index: int) -> dict[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "index": index,
        "utilisation_percent": rates.gpu,
        "memory_percent": rates.memory,  # of the time, read or written: hardly any while NCCL waits
        "power_watts": _watts(nvml, handle),
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "pids": [process.pid for process in processes],
    }


def _watts(nvml: Any, handle: Any) -> int | None:
    """The power; None where the board does not measure it."""
    try:
        return int(nvml.nvmlDeviceGetPowerUsage(handle)) // 1000
    except nvml.NVMLError:
        return None


# Each gives (suffix of its file, text, what was missed) or raises LookupError: not there. Those
# that ask for the job's own processes are added by the collector.
SOURCES: Mapping[str, Query] = {
    "gpus": query_gpus,
    "slurm": _slurm,
}


@dataclass(frozen=True)
class SourceAnswer:
    """`said`: read, failed, or why it is not there. `files`: (end of the name, text).

    The name ends in letters: a number at the end of a file's name is read as a rank.
    """

    said: str
    files: Sequence[tuple[str, str]] = ()
    missed: str = ""


def ask(name: str, sources: Mapping[str, Query] | None = None) -> SourceAnswer:
    """Ask one source; nothing is raised."""
    try:
        suffix, text, lost = (sources or SOURCES)[name]()
    except LookupError as error:
        return SourceAnswer(f"not there: {error.args[0] if error.args else error}")
    except Exception as error:  # noqa: BLE001  # a driver's fault must not end the collection
        return SourceAnswer("failed", missed=f"{type(error).__name__}: {error}")
    return SourceAnswer("read", [(suffix, text)], lost)
