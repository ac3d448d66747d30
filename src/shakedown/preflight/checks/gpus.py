"""GPUs: asked from the driver (nvidia-smi), else as Slurm and CUDA_VISIBLE_DEVICES promise them."""

import csv
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from shakedown.preflight.model import Facts, ProbeRequest, has_fault

_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
)


def gpus(request: ProbeRequest, node: str) -> Facts:
    """`source` driver | slurm | none, `count` usable ones, `lost` those that do not answer."""
    facts = dict(_from_driver() if shutil.which("nvidia-smi") else _promised(os.environ))
    if has_fault(request.faults, "gpu_missing", node):
        facts["lost"] = [*facts.get("lost", []), "GPU 0 (injected)"]
        facts["count"] = max(0, facts["count"] - 1)
    return facts


def _from_driver() -> Facts:
    # -L names all cards that the driver knows, the query only those that answer.
    listing = _smi("-L").stdout.splitlines()
    asked = _smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    answered = parse_smi(asked.stdout)
    seen = {gpu["uuid"] for gpu in answered}
    lost = [line for line in listing if not any(uuid in line for uuid in seen)]
    if asked.returncode and not answered and not lost:
        lost = [(asked.stdout + asked.stderr).strip()[:200]]
    return {
        "source": "driver",
        "count": _visible(os.environ, len(answered)),
        "installed": len(answered) + len(lost),
        "lost": lost,
        "gpus": answered,
    }


def _smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False)


def parse_smi(text: str) -> list[dict[str, Any]]:
    """Rows of nvidia-smi's CSV; what the card does not report (`[N/A]`) is null."""
    rows = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        # nvidia-smi reports a lost card among the rows: `Unable to determine the device handle ...`
        if len(row) == len(_FIELDS) and row[0].strip().isdecimal():
            values = [None if "N/A" in v or "Not Supported" in v else v.strip() for v in row]
            rows.append(dict(zip(_FIELDS, values, strict=True)))
    return rows


def _visible(environ: Mapping[str, str], installed: int) -> int:
    """CUDA_VISIBLE_DEVICES hides cards; where it is not set all are visible."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return installed if visible is None else min(installed, _entries(visible))


def _promised(environ: Mapping[str, str]) -> Facts:
    """No driver: what the scheduler gave this step."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name):
            return {"source": f"slurm ({name})", "count": _entries(environ[name]), "lost": []}
    return {"source": "none", "count": 0, "lost": []}


def _entries(text: str) -> int:
    return sum(entry.strip() not in ("", "-1", "NoDevFiles") for entry in text.split(","))
