"""`shakedown preflight` on this machine: real probes, real gloo."""

import json
import socket
from pathlib import Path

import pytest

from shakedown.cli import main
from shakedown.core.verdict import read_verdict

pytestmark = pytest.mark.slow  # each measures this machine for seconds

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)


def preflight(out: Path, *more: str) -> int:
    return main(["preflight", "--out", str(out), "--min-free-disk-gb", "0.01", *more])


def test_this_machine_is_checked_and_the_files_are_written(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")

    code = preflight(tmp_path / "out", "--path", str(tmp_path / "model.bin"))

    verdict = read_verdict(tmp_path / "out" / "verdict.json")
    assert code == 0
    assert verdict.stage == "preflight"
    assert verdict.status in ("PASS", "WARN")
    assert {"files", "shm", "names", "gpus", "paths", "all_reduce", "pairs", "reach"} <= {
        f.check for f in verdict.findings if f.status == "pass"
    }
    assert (tmp_path / "out" / "bad_nodes.txt").read_text() == ""
    node = json.loads((tmp_path / "out" / "nodes" / f"{HERE}.json").read_text())
    assert node["checks"]["paths"]["facts"]["paths"][str(tmp_path / "model.bin")]["bytes"] == 7
    pairs = json.loads((tmp_path / "out" / "pairs.json").read_text())
    assert [(p["a"], p["b"], p["ok"]) for p in pairs["pairs"]] == [(f"{HERE}#0", f"{HERE}#1", True)]
    left = sorted(p.name for p in (tmp_path / "out").iterdir() if p.name not in (".lease", "logs"))
    assert left == ["bad_nodes.txt", "good_nodes.txt", "nodes", "pairs.json", "verdict.json"]


def test_the_standard_tier_measures_matrix_products(tmp_path: Path) -> None:
    assert preflight(tmp_path, "--tier", "standard") == 0

    checks = {f.check for f in read_verdict(tmp_path / "verdict.json").findings}
    assert "gemm" in checks


def test_products_that_differ_are_data_corruption(tmp_path: Path) -> None:
    code = preflight(
        tmp_path, "--tier", "burn", "--burn-seconds", "0.5", "--fake-fault", f"wrong_math:{HERE}"
    )

    assert code == 1
    assert (tmp_path / "bad_nodes.txt").read_text() == f"{HERE}\n"
    assert "corruption" in (tmp_path / "verdict.json").read_text()


def test_results_of_an_earlier_run_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "old.json").write_text("{}")

    preflight(tmp_path, "--fake-fault", "probe_dead")

    assert list((tmp_path / "nodes").iterdir()) == []


def test_more_nodes_than_here_are_blocked(tmp_path: Path) -> None:
    assert preflight(tmp_path, "--nodes", "2") == 3

    assert "nodes" in {
        f.check for f in read_verdict(tmp_path / "verdict.json").findings if f.status == "error"
    }


def test_missing_gpus_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    assert preflight(tmp_path, "--expect-gpus", "64") == 1

    wrong = [f for f in read_verdict(tmp_path / "verdict.json").findings if f.status == "fail"]
    assert [(f.check, f.subject) for f in wrong] == [("gpus", HERE), ("torch_gpus", HERE)]


def test_a_config_gives_the_expectations_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Path(__file__).parents[3] / "config" / "config.yaml"
    monkeypatch.chdir(tmp_path)

    code = main(["preflight", "--config", str(shipped), "--expect-gpus", "64"])

    assert code == 1
    assert len(list(tmp_path.glob("results/*/preflight/verdict.json"))) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nodes", "0", "--out", "x"],
        ["--nodes", "1.5", "--out", "x"],
        ["--nodes", "n[1-", "--out", "x"],
        ["--nodes", "elsewhere1,elsewhere2", "--out", "x"],
        ["--job", "1;2", "--out", "x"],
        ["--once", "task", "--job", "1"],
        ["--tier", "slow", "--out", "x"],
        ["--timeout", "-1", "--out", "x"],
        ["--timeout", "nan", "--out", "x"],
        ["--port", "99999", "--out", "x"],
        ["--fake-fault", "no_disc", "--out", "x"],
        ["--config", "missing.yaml"],
    ],
)
def test_wrong_arguments_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(["preflight", *arguments])
    except SystemExit as stop:
        code = stop.code

    assert code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_job_without_a_slurm_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["preflight", "--job", "1", "--out", str(tmp_path / "x")]) == 3
    assert "--job 1: scontrol is not installed on this host" in capsys.readouterr().err
