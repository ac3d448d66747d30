"""How busy this host's GPUs are, by NVML: one that spins in a collective is busy as well."""

import importlib
import json
import socket
from typing import Any

SCHEMA = "shakedown/gpus/1"


def query() -> tuple[str, str, str]:
    """(suffix of the file, its text, what was missed): one row a GPU, in percent, watts and bytes.

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
    body = {"schema": SCHEMA, "host": socket.gethostname(), "gpus": rows}
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
    """None where the board does not measure it."""
    try:
        return int(nvml.nvmlDeviceGetPowerUsage(handle)) // 1000
    except nvml.NVMLError:
        return None
