"""GPUs as torch sees them in the job's environment: a child process imports torch and computes."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from shakedown.preflight.check import Check, CheckJudgement, Fleet
from shakedown.preflight.datatypes import Expectations, NodeFacts, ProbeRequest
from shakedown.preflight.gpu_models import MIN_MEMORY_SHARE, model_of
from shakedown.preflight.outliers import slow_ones

_EXTRA = "pip install 'slurm-shakedown[cuda]'"


def measure(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`version`, `cuda` and `nccl` of torch, `count` of GPUs, `failed`: torch's error."""
    return _ask_torch(request.limit)


def measure_speed(request: ProbeRequest, node: str) -> NodeFacts:  # noqa: ARG001
    """`devices`: one row per GPU with its name and rates; see preflight/torch_view.py."""
    return _ask_torch(request.limit, "--speed", request.want.model)


def _ask_torch(limit: float, *more: str) -> NodeFacts:
    """The facts in the child's last output.

    Raises:
        RuntimeError: it printed nothing readable.
    """
    command = [sys.executable, "-P", "-m", "shakedown.preflight.torch_view", *more]
    # Its own limit, a little before the check's, so that the child's last output is reported.
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    lines = ended.stdout.strip().splitlines()
    try:
        facts = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = ended.stderr.strip().splitlines() or ["nothing"]
        raise RuntimeError(f"torch ended with {ended.returncode}: {said[-1][:300]}") from None
    return dict(facts)


def judge(facts: NodeFacts, want: Expectations) -> CheckJudgement:
    """Good GPUs are useless to a CPU build of torch."""
    expected = f">= {want.gpus} that compute"
    if facts["failed"] or facts["count"] < want.gpus:
        measured: Any = facts["failed"] or facts["count"]
        remedy = "check CUDA_VISIBLE_DEVICES, and whether torch's CUDA version fits the driver"
        if facts["version"] is None:
            measured, remedy = "torch is not installed", _EXTRA
        elif facts["cuda"] is None:
            measured, remedy = f"torch {facts['version']} is a CPU build", _EXTRA
        return CheckJudgement("fail", measured, expected, "", "environment", remedy)
    return CheckJudgement("pass", f"{facts['count']} (torch {facts['version']})", expected, "GPUs")


def judge_speed(facts: NodeFacts, want: Expectations) -> CheckJudgement:  # noqa: ARG001
    """Compare with the model's numbers, and with the node's other GPUs."""
    rows = facts["devices"]
    if facts["failed"] or not rows:
        return CheckJudgement("error", facts["failed"] or "torch sees no GPU", "rates of each GPU")
    fails, warns = _below_model(rows), []
    for rate in ("to_gpu_gb_s", "to_host_gb_s", "memory_gb_s", *_shapes(rows)):
        values = {str(number): [float(row[rate])] for number, row in enumerate(rows)}
        fails += [
            f"GPU {gpu}: {rate} {values[gpu][0]:g}, {share:.0%} of the node's others"
            for gpu, share in slow_ones(values).items()
        ]
    warns = [
        f"GPU {number}: memory {row['memory_gb_s']:g} GB/s of {model.memory:g}"
        for number, row in enumerate(rows)
        if (model := model_of(row["name"])) and row["memory_gb_s"] < MIN_MEMORY_SHARE * model.memory
    ]
    remedy = "check clocks, temperature, power and PCIe lanes; compare with a good node"
    if fails or warns:
        status, wrong = ("fail", fails) if fails else ("warn", warns)
        return CheckJudgement(status, wrong, "as fast as its model", "", "node", remedy)  # type: ignore[arg-type]
    return CheckJudgement("pass", _slowest(rows), "as fast as its model, and as its neighbours")


def _below_model(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"GPU {number}: {rate} {row[rate]:g}, {row['name']} has {model.host:g}"
        for number, row in enumerate(rows)
        if (model := model_of(row["name"]))
        for rate in ("to_gpu_gb_s", "to_host_gb_s")
        if row[rate] < model.host
    ]


def _shapes(rows: list[dict[str, Any]]) -> list[str]:
    return [key for key in rows[0] if key.startswith("gemm ")]


def _slowest(rows: list[dict[str, Any]]) -> dict[str, float]:
    rates = [key for key in rows[0] if key != "name"]
    return {rate: min(float(row[rate]) for row in rows) for rate in rates}


def compare_speed(fleet: Fleet) -> Mapping[str, CheckJudgement]:
    """A node whose slowest GPU is an outlier among the nodes' slowest."""
    slowest = {
        node: _slowest(facts["devices"])
        for node, facts in fleet.facts("gpu_speed").items()
        if facts["devices"]
    }
    found: dict[str, CheckJudgement] = {}
    for rate in dict.fromkeys(rate for row in slowest.values() for rate in row):
        values = {node: [row[rate]] for node, row in slowest.items() if rate in row}
        for node, share in slow_ones(values).items():
            measured = f"{rate}: {values[node][0]:g}, {share:.0%} of the other nodes"
            found[node] = CheckJudgement("fail", measured, _NO_OUTLIER, remedy="drain the node")
    return found


_NO_OUTLIER = ">= 95 % of the median, or within the usual spread"

TORCH_GPUS = Check(
    "torch_gpus",
    "torch, in the job's environment, is missing, is a CPU build, sees fewer GPUs than "
    "expected, or cannot compute on one",
    measure,
    judge,
    needs="gpus",
    limit="`gpus_per_node`",
    source="CPU builds of torch although nvidia-smi is fine",
)
GPU_SPEED = Check(
    "gpu_speed",
    "host-to-device or device-to-host transfers below the model's number, a GPU slower than the "
    "others of its node (also for the model's own matrix products); warns: slow GPU memory",
    measure_speed,
    judge_speed,
    tier="standard",
    needs="gpus",
    limit="the table of GPU models; the rule for slow ones below",
    source="AzNHC; Iglewicz and Hoaglin",
)
SPEED_OUTLIERS = Check(
    "speed_outliers",
    "a node whose slowest GPU is far slower than those of the other nodes",
    compare=compare_speed,
    tier="standard",
    needs="gpus",
    limit="the rule for slow ones below",
    source="Iglewicz and Hoaglin; simulated on 8 to 128 nodes",
)
