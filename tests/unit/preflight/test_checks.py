"""One node's facts against what the run expects."""

from typing import Any

import pytest

from shakedown.preflight.check import CheckJudgement
from shakedown.preflight.checks import CHECKS
from shakedown.preflight.datatypes import Expectations

WANT = Expectations(gpus=2, min_free_disk_gb=5, min_shm_mb=100)
RATES = {"name": "?", "to_gpu_gb_s": 1.0, "to_host_gb_s": 1.0, "memory_gb_s": 1.0}
GOOD: dict[str, dict[str, Any]] = {
    "memory": {"total_mb": 1000, "available_mb": 900, "limit_mb": None},
    "shm": {"free_mb": 100.0},
    "limits": {"nofile": 4096, "nproc": None, "memlock_mb": None},
    "files": {"folder": "/r", "type": "nfs", "free_gb": 5.0, "free_files": None, "steps": {}},
    "names": {
        "hostname": "h",
        "addresses": ["10.0.0.1"],
        "error": "",
        "own": ["10.0.0.1"],
        "unresolved": {},
    },
    "ports": {"asked": [29500], "taken": {}},
    "gpus": {"source": "nvml", "count": 2, "lost": [], "installed": 2, "gpus": []},
    "locks": {"failed": "", "taken": False, "unheld": False},
    "interfaces": {
        "interfaces": ["eth0"],
        "asked": {"gloo": "eth0", "nccl": ""},
        "chosen": {"gloo": "eth0", "nccl": "eth0"},
    },
    "hub": {"folder": "/h", "cached": {}, "offline": False, "unreached": ""},
    "parts": {"faults": {}, "raised": {}},
    "torch_gpus": {"version": "2", "cuda": "13.0", "nccl": "2", "count": 2, "failed": ""},
    "xid": {"errors": [], "unreadable": ""},
    "gpu_speed": {"failed": "", "devices": [RATES]},
    "paths": {"paths": {"/m": {"files": 1, "bytes": 2, "digest": "x"}}},
}
JUDGED = [name for name, check in CHECKS.items() if check.judge]
FAILED = {"step": "fsync", "errno": "ENOSPC", "message": "No space left"}


def judged(check: str, facts: dict[str, Any], want: Expectations) -> CheckJudgement:
    judge = CHECKS[check].judge
    assert judge is not None
    return judge(facts, want)


@pytest.mark.parametrize("check", JUDGED)
def test_good_facts_pass(check: str) -> None:
    assert judged(check, GOOD[check], WANT).status == "pass"


@pytest.mark.parametrize(
    ("check", "change", "status", "blame"),
    [
        ("memory", {"available_mb": 99}, "warn", "node"),
        ("memory", {"limit_mb": 100, "available_mb": 900}, "pass", "node"),
        ("shm", {"free_mb": 99.9}, "fail", "node"),
        ("limits", {"nofile": 2048}, "warn", "node"),
        ("limits", {"nofile": 256}, "fail", "node"),
        ("limits", {"memlock_mb": 8}, "warn", "node"),
        ("files", {"failed": FAILED}, "fail", "node"),
        ("files", {"free_gb": 4.9}, "fail", "environment"),
        ("files", {"free_files": 3}, "warn", "environment"),
        ("files", {"steps": {"fsync": 4.0, "rename": 1.5}}, "warn", "environment"),
        ("files", {"steps": {"fsync": 6.0, "rename": 0.5}}, "warn", "environment"),
        ("locks", {"failed": "ENOLCK"}, "warn", "environment"),
        ("locks", {"taken": True}, "warn", "environment"),
        ("interfaces", {"chosen": {"gloo": "", "nccl": "eth0"}}, "fail", "user"),
        ("names", {"addresses": [], "error": "unknown"}, "fail", "node"),
        ("names", {"addresses": ["169.254.0.9"]}, "fail", "node"),
        ("names", {"addresses": ["fe80::1%eth0"]}, "fail", "node"),
        ("names", {"addresses": ["10.9.9.9"]}, "fail", "node"),
        ("names", {"addresses": ["10.9.9.9", "10.0.0.1"]}, "pass", "node"),
        ("names", {"addresses": ["127.0.1.1"]}, "pass", "node"),
        ("names", {"unresolved": {"n2": "unknown"}}, "fail", "environment"),
        ("ports", {"taken": {"29500": "in use"}}, "fail", "node"),
        ("gpus", {"count": 1, "installed": 1}, "fail", "node"),
        ("gpus", {"count": 1, "installed": 2}, "fail", "user"),
        ("gpus", {"lost": ["GPU 3"]}, "fail", "node"),
        ("paths", {"paths": {"/m": {"error": "no"}}}, "fail", "environment"),
    ],
)
def test_bad_facts_are_named(check: str, change: dict[str, Any], status: str, blame: str) -> None:
    outcome = judged(check, {**GOOD[check], **change}, WANT)

    assert (outcome.status, outcome.blame) == (status, blame)


def test_no_gpu_is_right_when_none_is_expected() -> None:
    facts = {"source": "none", "count": 0, "lost": [], "gpus": []}

    assert judged("gpus", facts, Expectations(gpus=0)).status == "pass"
    assert judged("gpus", facts, Expectations(gpus=1)).status == "fail"


def test_memlock_does_not_matter_without_gpus() -> None:
    facts = {**GOOD["limits"], "memlock_mb": 8}

    assert judged("limits", facts, Expectations(gpus=0)).status == "pass"
