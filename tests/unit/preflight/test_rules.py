"""One node's facts against what the run expects."""

from typing import Any

import pytest

from shakedown.preflight.checks.gpus import parse_smi
from shakedown.preflight.model import Expectations
from shakedown.preflight.rules import RULES

WANT = Expectations(gpus=2, min_free_disk_gb=5, min_shm_mb=100)
GPU = {
    "index": "0",
    "memory.total": "80000",
    "memory.used": "10",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
}
GOOD: dict[str, dict[str, Any]] = {
    "memory": {"total_mb": 1000, "available_mb": 900, "limit_mb": None},
    "shm": {"free_mb": 100.0},
    "limits": {"nofile": [4096, 8192], "nproc": [None, None], "memlock_mb": [None, None]},
    "files": {"folder": "/r", "free_gb": 5.0, "free_files": None},
    "names": {
        "hostname": "h",
        "addresses": ["10.0.0.1"],
        "error": "",
        "interfaces": {"eth0": ["10.0.0.1"]},
        "unresolved": {},
    },
    "ports": {"range": [1, 64], "free": [1, 2], "taken": {}},
    "gpus": {"source": "driver", "count": 2, "lost": [], "installed": 2, "gpus": [GPU]},
    "paths": {"paths": {"/m": {"files": 1, "bytes": 2, "digest": "x"}}},
}
FAILED = {"step": "fsync", "errno": "ENOSPC", "message": "No space left"}


@pytest.mark.parametrize("check", RULES)
def test_good_facts_pass(check: str) -> None:
    assert RULES[check](GOOD[check], WANT).status == "pass"


@pytest.mark.parametrize(
    ("check", "change", "status", "blame"),
    [
        ("memory", {"available_mb": 99}, "warn", "node"),
        ("memory", {"limit_mb": 100, "available_mb": 900}, "pass", "node"),
        ("shm", {"free_mb": 99.9}, "fail", "node"),
        ("limits", {"nofile": [2048, 8192]}, "warn", "node"),
        ("limits", {"nofile": [256, 256]}, "fail", "node"),
        ("limits", {"memlock_mb": [8, 8]}, "warn", "node"),
        ("files", {"failed": FAILED}, "fail", "node"),
        ("files", {"free_gb": 4.9}, "fail", "environment"),
        ("files", {"free_files": 3}, "warn", "environment"),
        ("names", {"addresses": [], "error": "unknown"}, "fail", "node"),
        ("names", {"addresses": ["169.254.0.9"]}, "fail", "node"),
        ("names", {"addresses": ["fe80::1%eth0"]}, "fail", "node"),
        ("names", {"addresses": ["10.9.9.9"]}, "fail", "node"),
        ("names", {"addresses": ["10.9.9.9", "10.0.0.1"]}, "pass", "node"),
        ("names", {"addresses": ["127.0.1.1"]}, "pass", "node"),
        ("names", {"unresolved": {"n2": "unknown"}}, "fail", "environment"),
        ("ports", {"free": []}, "fail", "node"),
        ("ports", {"taken": {"29500": "in use"}}, "fail", "node"),
        ("gpus", {"count": 1, "installed": 1}, "fail", "node"),
        ("gpus", {"count": 1, "installed": 2}, "fail", "user"),
        ("gpus", {"lost": ["GPU 3"]}, "fail", "node"),
        ("gpus", {"gpus": [GPU | {"ecc.errors.uncorrected.volatile.total": "2"}]}, "fail", "node"),
        (
            "gpus",
            {"gpus": [GPU | {"clocks_throttle_reasons.hw_slowdown": "Active"}]},
            "fail",
            "node",
        ),
        ("gpus", {"gpus": [GPU | {"memory.used": "70000"}]}, "warn", "node"),
        ("paths", {"paths": {"/m": {"error": "no"}}}, "fail", "environment"),
        ("paths", {"paths": {}}, "skip", "none"),
    ],
)
def test_bad_facts_are_named(check: str, change: dict[str, Any], status: str, blame: str) -> None:
    outcome = RULES[check]({**GOOD[check], **change}, WANT)

    assert (outcome.status, outcome.blame) == (status, blame)


def test_no_gpu_is_right_when_none_is_expected() -> None:
    facts = {"source": "none", "count": 0, "lost": []}

    assert RULES["gpus"](facts, Expectations(gpus=0)).status == "pass"
    assert RULES["gpus"](facts, Expectations(gpus=1)).status == "fail"


def test_memlock_does_not_matter_without_gpus() -> None:
    facts = {**GOOD["limits"], "memlock_mb": [8, 8]}

    assert RULES["limits"](facts, Expectations(gpus=0)).status == "pass"


def test_nvidia_smi_rows_are_read_and_other_lines_left_out() -> None:
    text = (
        "0, GPU-aa, NVIDIA H100, 81559, 4, 0, Not Active\n"
        "1, GPU-bb, NVIDIA H100, 81559, 4, [N/A], Not Active\n"
        "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost\n"
    )

    rows = parse_smi(text)

    assert [row["uuid"] for row in rows] == ["GPU-aa", "GPU-bb"]
    assert rows[1]["ecc.errors.uncorrected.volatile.total"] is None
