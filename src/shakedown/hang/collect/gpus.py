"""Utilisation and memory of this host's GPUs by NVML: a GPU that is busy waits in a kernel."""

import importlib
import json
from typing import Any

SCHEMA = "shakedown/gpus/1"


def query() -> tuple[str, str, str]:
    """(suffix of the file, its text, what was missed): one row a GPU, in percent and bytes.

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
    body = {"schema": SCHEMA, "gpus": rows}
    return "gpus.json", json.dumps(body, indent=2) + "\n", "; ".join(missed)


def _row(nvml: Any, index: int) -> dict[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "index": index,
        "utilisation_percent": rates.gpu,
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "pids": [process.pid for process in processes],
    }
