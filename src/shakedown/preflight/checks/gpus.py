"""GPUs according to the driver (NVML), else as promised by Slurm and CUDA_VISIBLE_DEVICES."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from shakedown.core.verdict import FindingStatus
from shakedown.preflight.check import Check, CheckJudgement, Fleet, unlike_most
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest
from shakedown.preflight.gpu_models import is_model

_DRIVER = Path("/proc/driver/nvidia/version")
# Reasons of nvmlDeviceGetCurrentClocksEventReasons that are faults; power capping and idling are
# normal. Hardware slowdowns halve the GPU's clock or worse.
_HARDWARE = {"HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"}
_THROTTLING = (*sorted(_HARDWARE), "SwThermalSlowdown")
_USED_SHARE = 0.1


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`source`: nvml | slurm | none; `count`: usable GPUs; `lost`: GPUs that do not answer.

    `gpus`: one row each, with null for values that a card does not report.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        unasked = "nvidia-ml-py is not installed" if _DRIVER.exists() else "no driver here"
        return {**_promised(os.environ), "unasked": unasked}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {**_promised(os.environ), "unasked": str(error)}
    try:
        return _from_driver(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _from_driver(nvml: Any) -> NodeFacts:
    rows, lost = [], []
    installed = nvml.nvmlDeviceGetCount()
    for index in range(installed):
        try:
            rows.append(_card(nvml, index))
        except nvml.NVMLError as error:
            lost.append(f"GPU {index}: {error}")
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return {
        "source": "nvml",
        "unasked": "",
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "count": _visible(os.environ, len(rows)),
        "installed": installed,
        "lost": lost,
        "gpus": rows,
    }


def _card(nvml: Any, index: int) -> dict[str, Any]:
    """One GPU.

    Raises:
        NVMLError: it does not answer.
    """
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)

    def ask(question: Callable[..., Any], *more: Any) -> Any:
        """The value; None if this GPU model, or a virtual one, does not have it."""
        try:
            return question(handle, *more)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
                return None
            raise

    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    remapped = ask(nvml.nvmlDeviceGetRemappedRows)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    links = [ask(nvml.nvmlDeviceGetNvLinkState, n) for n in range(nvml.NVML_NVLINK_MAX_LINKS)]
    running = [p.pid for p in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []]
    # Read afterwards, as the other checks of this probe may have started some of them.
    own = {child.pid for child in psutil.Process(os.getppid()).children(recursive=True)}
    return {
        "index": index,
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_mb": memory.total // 2**20,
        "used_mb": memory.used // 2**20,
        "processes": sorted(set(running) - own),
        "ecc_uncorrected": ask(nvml.nvmlDeviceGetTotalEccErrors, uncorrected, volatile),
        "remap_pending": bool(remapped and remapped[2]),
        "remap_failed": bool(remapped and remapped[3]),
        "throttle": [
            r for r in _THROTTLING if reasons & getattr(nvml, f"nvmlClocksEventReason{r}")
        ],
        # Only the width, as an idle GPU lowers the generation to save power.
        "pcie_width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        "pcie_most": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        "nvlinks": sum(link == 1 for link in links),
        "nvlinks_down": sum(link == 0 for link in links),
    }


def _visible(environ: Mapping[str, str], installed: int) -> int:
    """The cards that CUDA_VISIBLE_DEVICES shows; all if it is not set."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return installed if visible is None else min(installed, _entries(visible))


def _promised(environ: Mapping[str, str]) -> NodeFacts:
    """Without a driver: the GPUs that the scheduler gave this step."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name):
            count = _entries(environ[name])
            return {"source": f"slurm ({name})", "count": count, "lost": [], "gpus": []}
    return {"source": "none", "count": 0, "lost": [], "gpus": []}


def _entries(text: str) -> int:
    return sum(entry.strip() not in ("", "-1", "NoDevFiles") for entry in text.split(","))


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:
    """The expected number of usable GPUs of the right model, none lost, all healthy."""
    count, expected = facts["count"], f">= {want.gpus}"
    if facts["lost"]:
        remedy = "a GPU fell off the bus: drain the node; see XID errors in dmesg"
        return CheckJudgement(
            "fail", f"lost: {'; '.join(facts['lost'])}", "none lost", remedy=remedy
        )
    if count < want.gpus:
        hidden = facts.get("installed", count) >= want.gpus
        remedy = "request GPUs: --gres=gpu:N or --gpus-per-node; see CUDA_VISIBLE_DEVICES"
        return CheckJudgement("fail", count, expected, "GPUs", "user" if hidden else "node", remedy)
    others = {gpu["name"] for gpu in facts["gpus"] if not is_model(gpu["name"], want.gpu_model)}
    if others:
        remedy = "ask Slurm for the model: --gres=gpu:MODEL:N, or change cluster.gpu_model"
        return CheckJudgement("fail", sorted(others), want.gpu_model, "", "user", remedy)
    status, wrong = _health(facts["gpus"])
    if wrong:
        return CheckJudgement(status, wrong, "healthy and identical", "", "node", _REMEDIES[status])
    if want.gpus and facts["source"] != "nvml":
        remedy = f"pip install nvidia-ml-py, and check the driver: {facts['unasked']}"
        measured = f"{count}, promised by {facts['source']}; the driver was not queried"
        return CheckJudgement("warn", measured, expected, "", "environment", remedy)
    return CheckJudgement("pass", f"{count} ({facts['source']})", expected, "GPUs")


_REMEDIES: dict[FindingStatus, str] = {
    "fail": "drain the node; nvidia-smi -q says more",
    "warn": "nvidia-smi shows their users and temperatures",
}


def _health(gpus: list[dict[str, Any]]) -> tuple[FindingStatus, list[str]]:
    """The worst status, and its faults."""
    fails = [f"GPU {gpu['index']}: {fault}" for gpu in gpus for fault in _faults(gpu)]
    alike = {g["index"]: {k: g[k] for k in _ALIKE} for g in gpus}
    odd = unlike_most({str(index): row for index, row in alike.items()})
    fails += [f"GPU {i}: {name} {says}" for i, row in odd.items() for name, says in row.items()]
    if fails:
        return "fail", fails
    return "warn", [f"GPU {gpu['index']}: {fault}" for gpu in gpus for fault in _warnings(gpu)]


_ALIKE = ("name", "memory_mb", "pcie_width", "nvlinks")


def _faults(gpu: Mapping[str, Any]) -> list[str]:
    faults = [
        (gpu["ecc_uncorrected"], f"{gpu['ecc_uncorrected']} uncorrected memory errors"),
        (gpu["remap_pending"], "a row remapping is pending: reset the GPU"),
        (gpu["remap_failed"], "a row could not be remapped: replace the GPU"),
        (gpu["nvlinks_down"], f"{gpu['nvlinks_down']} NVLinks are down"),
        (
            (gpu["pcie_width"] or 0) < (gpu["pcie_most"] or 0),
            f"PCIe x{gpu['pcie_width']} of x{gpu['pcie_most']}",
        ),
        (_HARDWARE & set(gpu["throttle"]), f"slowed down: {', '.join(gpu['throttle'])}"),
    ]
    return [text for wrong, text in faults if wrong]


def _warnings(gpu: Mapping[str, Any]) -> list[str]:
    found = [f"slowed down: {', '.join(gpu['throttle'])}"] if gpu["throttle"] else []
    if gpu["processes"] or gpu["used_mb"] > _USED_SHARE * gpu["memory_mb"]:
        found.append(f"{gpu['used_mb']} MB in use by processes {gpu['processes'] or 'unknown'}")
    return found


def compare(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """GPU models, driver, CUDA and NCCL: a node that differs hangs or crashes in the first
    collective."""
    torch = fleet.facts("torch_gpus")
    rows = {
        node: {
            "driver": facts.get("driver"),
            "driver's CUDA": facts.get("cuda"),
            "models": ", ".join(sorted({gpu["name"] for gpu in facts["gpus"]})),
            "torch's CUDA": torch.get(node, {}).get("cuda"),
            "NCCL": torch.get(node, {}).get("nccl"),
        }
        for node, facts in fleet.facts("gpus").items()
    }
    remedy = "update the node's driver, or use one environment on all nodes"
    return {
        node: CheckJudgement("fail", other, _SAME, "", "node", remedy)
        if other
        else CheckJudgement(
            "pass", {name: text for name, text in rows[node].items() if text}, _SAME
        )
        for node, other in unlike_most(rows).items()
    }


_SAME = "the same on all nodes"

GPUS = Check(
    "gpus",
    "fewer GPUs than expected, another model, one that does not answer, uncorrected memory errors, "
    "a pending or failed row remapping, an NVLink that is down, fewer PCIe lanes, a hardware "
    "slowdown, a GPU that differs from others of its node; warns: thermal slowdown, processes or "
    "memory in use, a driver that cannot be queried",
    measure,
    judge,
    health=True,
    limit="0; 10 % of the memory",
    source="gcm, Meta (row remapping); gcm and AzNHC (throttling)",
)
GPU_VERSIONS = Check(
    "gpu_versions",
    "GPU model, driver, CUDA or NCCL differ from most nodes",
    compare=compare,
    needs="gpus",
    limit="equal",
    source="NCCL refuses ranks of another version",
)
