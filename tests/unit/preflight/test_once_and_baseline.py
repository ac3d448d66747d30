"""One line and one exit code for who asks one node; the site's own values."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shakedown.cli import main
from shakedown.core.errors import UsageError
from shakedown.core.verdict import Finding
from shakedown.preflight.check import Fleet
from shakedown.preflight.checks import baseline
from shakedown.preflight.datatypes import CheckReport, Expectations, NodeFacts, NodeReport
from shakedown.preflight.node_check import MODES, one_line
from tests.nvml_stub import Card, install


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    # A Prolog has no user's environment, and no Slurm command may be called.
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


def once(capsys: pytest.CaptureFixture[str], mode: str, *more: str) -> tuple[int, str]:
    code = main(["preflight", "--once", mode, *more])
    (line,) = capsys.readouterr().out.splitlines()
    return code, line


@pytest.mark.parametrize("mode", MODES)
def test_a_good_node_is_one_line_and_0(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = once(capsys, mode)

    assert code == 0
    # Slurm shows of a TaskProlog's output what stands behind this word.
    assert line.startswith("print ") == (mode == "task")
    line = line.removeprefix("print ")
    assert re.fullmatch(r"PREFLIGHT OK - \S+: \d+ passed.* \| 'memory'=\d+ 'shm'=[\d.]+", line)


@pytest.mark.parametrize(("mode", "code"), [("nagios", 2), ("health", 1), ("task", 1)])
def test_a_bad_node_has_the_callers_exit_code(
    mode: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = once(capsys, mode, "--fake-fault", "low_shm")

    assert found[0] == code
    assert "PREFLIGHT CRITICAL" in found[1]
    assert "shm: 1.0" in found[1]


def test_the_other_tasks_of_a_node_check_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert main(["preflight", "--once", "task", "--fake-fault", "low_shm"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("mode", "code"), [("nagios", 3), ("health", 3), ("epilog", 0)])
def test_a_check_that_hangs_is_unknown_and_drains_no_node(
    mode: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = once(capsys, mode, "--fake-fault", "probe_hang", "--timeout", "2")

    assert found[0] == code
    assert "PREFLIGHT UNKNOWN" in found[1]


def test_what_a_user_is_to_blame_for_drains_no_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense9")

    code, line = once(capsys, "prolog")

    assert code == 0
    assert "PREFLIGHT WARNING" in line
    assert "nonsense9" in line


def test_a_bad_gpu_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, [Card(), Card(ecc=3)])

    code, line = once(capsys, "nagios", "--expect-gpus", "2")

    assert code == 2
    assert "GPU 1: 3 uncorrected memory errors" in line


def test_a_line_stays_one_line_with_one_bar() -> None:
    findings = [Finding("x", "fail", measured="two\nlines | and a bar" * 100)]

    line = one_line("n1", "FAIL", findings)

    assert "|" not in line
    assert "\n" not in line
    assert len(line) < 450


RATES = {"name": "H100", "to_gpu_gb_s": 50.0, "memory_gb_s": 3000.0}


def reports(**changes: Any) -> dict[str, NodeReport]:
    machine: NodeFacts = {"boot_id": "b", "kernel": "6.1", "libc": "2.36", "cpus": 8}
    facts: dict[str, NodeFacts] = {
        "machine": machine,
        "memory": {"total_mb": 64_000},
        "gpus": {"driver": "580", "gpus": [{"name": "H100"}]},
        "gpu_speed": {"devices": [RATES, {**RATES, **changes.pop("slow", {})}]},
    }
    facts["machine"] = {**machine, **changes}
    return {"n1": NodeReport("n1", {name: CheckReport(row) for name, row in facts.items()})}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "pass"),
        ({"kernel": "6.2"}, "warn"),
        ({"slow": {"memory_gb_s": 2950.0}}, "pass"),
        ({"slow": {"memory_gb_s": 2850.0}}, "warn"),
        ({"slow": {"memory_gb_s": 2700.0}}, "fail"),
    ],
)
def test_a_node_is_compared_with_what_was_recorded(
    tmp_path: Path, changes: dict[str, Any], status: str
) -> None:
    file = tmp_path / "baseline.json"
    baseline.record_baseline(file, reports())
    want = Expectations(baseline=baseline.read_baseline(file))

    found = baseline.compare(Fleet(reports(**changes), want))["n1"]

    assert found.status == status


@pytest.mark.parametrize(
    "body",
    ["", "[]", '{"schema": "x"}', '{"schema": "shakedown/preflight-baseline/1", "values": [1]}']
    + ['{"schema": "shakedown/preflight-baseline/1", "values": {"a": {}}}'],
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, body: str) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(body)

    with pytest.raises(UsageError, match=str(file)):
        baseline.read_baseline(file)


def test_this_machine_is_compared_with_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    schema = "shakedown/preflight-baseline/1"
    file.write_text(json.dumps({"schema": schema, "values": {"kernel": "1.0"}}))

    code, line = once(capsys, "nagios", "--baseline", str(file))

    assert code == 1
    assert "in the baseline 1.0" in line
