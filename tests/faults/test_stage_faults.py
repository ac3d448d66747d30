"""Faults injected into a real training stage on two ranks: outcome, evidence, no process left."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.paths import RunPaths
from shakedown.monitor.heartbeat import read_heartbeats
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = pytest.mark.slow

STAGE = {"steps": 400, "batch_size": 16, "eval_samples": 0, "checkpoint_every": 5}
PATIENCE = {"stall_timeout": 8.0, "start_timeout": 120.0}
Train = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and data, small."""
    folder = tmp_path_factory.mktemp("assets")
    config = folder / "config.yaml"
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body["data"] |= {"train_size": 500, "heldout_size": 50}
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "assets", "--config", str(config)]
    subprocess.run([*command, "--out", str(folder)], check=True, timeout=120)
    return folder / "assets.json"


@pytest.fixture
def train(tmp_path: Path, assets: Path) -> Train:
    """Start `shakedown train sft` with a fault."""

    def start(fault: dict[str, Any] | None, **changes: Any) -> "subprocess.Popen[str]":
        body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
        body |= {"run": "faults", "results": str(tmp_path), "order": ["sft"]}
        body["stages"] = {"sft": {**body["stages"]["sft"], **STAGE, **PATIENCE, **changes}}
        body["stages"]["sft"]["fault"] = fault
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(body), encoding="utf-8")
        command = [sys.executable, "-m", "shakedown.cli", "train", "sft"]
        return subprocess.Popen(
            [*command, "--config", str(config), "--assets", str(assets)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def _finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=240)
    print(output[-5000:])
    return output


def _stage(tmp_path: Path) -> Any:
    return RunPaths(tmp_path / "faults").stage("sft")


def _diagnose(tmp_path: Path) -> dict[str, Any]:
    stage = _stage(tmp_path)
    command = [sys.executable, "-m", "shakedown.cli", "hang", "diagnose"]
    subprocess.run([*command, "--stage", str(stage.root)], check=False, timeout=120)
    return read_json(stage.diagnosis)


def test_killed_rank_ends_its_siblings_and_is_the_one_reported(
    tmp_path: Path, train: Train
) -> None:
    process = train({"kind": "kill_rank", "rank": 1, "step": 6})

    _finish(process)

    outcome = read_json(_stage(tmp_path).outcome)
    diagnosis = _diagnose(tmp_path)["diagnosis"]
    assert process.returncode == 1
    assert (outcome["state"], outcome["failed_component"]) == ("failed", "trainer-rank1")
    assert outcome["exit_codes"]["trainer-rank1"] == -signal.SIGKILL
    assert diagnosis["culprits"]["ranks"] in ([1], [])
    assert not processes_that_mention(str(tmp_path))


@pytest.mark.exhaustive
def test_sigterm_saves_and_the_next_attempt_goes_on(tmp_path: Path, train: Train) -> None:
    process = train(None)
    _wait_for_step(tmp_path, 3)

    process.send_signal(signal.SIGTERM)
    _finish(process)

    stage = _stage(tmp_path)
    assert process.returncode == 3
    assert not stage.outcome.exists()
    outcome = read_json(stage.attempt(1).outcome)
    assert outcome["state"] == "interrupted"
    assert "stopped by SIGTERM, state saved; run the same command again" in outcome["sentence"]
    assert not processes_that_mention(str(tmp_path))
    again = train(None, steps=30)
    _finish(again)
    assert again.returncode == 0
    log = stage.attempt(2).log("trainer-rank0").read_text(encoding="utf-8")
    assert "resuming from" in log


def test_a_rank_that_hangs_does_not_hang_the_stop(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # where Slurm's KillWait bounds the time
    process = train({"kind": "busy_rank", "rank": 1, "step": 7}, stall_timeout=300.0)
    _wait_for_step(tmp_path, 7)

    process.send_signal(signal.SIGTERM)
    _finish(process)

    stage = _stage(tmp_path)
    outcome = read_json(stage.attempt(1).outcome)
    assert process.returncode == 3
    assert not stage.outcome.exists()
    assert outcome["state"] == "interrupted"
    assert "trainer-rank1 did not end" in outcome["sentence"]
    assert outcome["sentence"].endswith("resume after step 5")
    assert not processes_that_mention(str(tmp_path))


def test_supervisor_killed_leaves_no_rank_behind(tmp_path: Path, train: Train) -> None:
    process = train(None)
    _wait_for_step(tmp_path, 2)

    process.kill()
    process.communicate(timeout=60)

    deadline = time.monotonic() + 40
    while processes_that_mention(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not processes_that_mention(str(tmp_path))


def _wait_for_step(tmp_path: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    folder = _stage(tmp_path).attempt(1).heartbeats
    while time.monotonic() < deadline:
        if any(beat.step >= step for beat in read_heartbeats(folder)):
            return
        time.sleep(0.2)
    raise AssertionError(f"no rank reached step {step}")
