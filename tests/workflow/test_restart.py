"""A stage that is restarted with another learning rate, under the workflow."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shakedown.core.paths import RunPaths, StagePaths
from tests.workflow.helpers import ROOT, Run, read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_overlay(folder: Path, *, lr: float) -> Path:
    stage = {"allocation": "fsdp:d1", "steps": 2, "batch_size": 4, "eval_samples": 0}
    body = {
        "run": "again",
        "results": str(folder / "results"),
        "order": ["sft"],
        "stages": {"sft": {**stage, "optimizer": {"lr": lr, "warmup_steps": 0}}},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


def rates(metrics: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in metrics.read_text(encoding="utf-8").splitlines()]


def restart(stage: StagePaths) -> subprocess.CompletedProcess[str]:
    """Run what the verdict says is next of a stage that is to be trained anew."""
    told = read_json(stage.verdict)["next"].partition("train again under this one: ")[2]
    program, *words = shlex.split(told)
    assert (program, words[-1]) == ("shakedown", "--restart"), told
    command = [sys.executable, "-m", "shakedown.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_stage_is_trained_anew_at_another_rate_and_its_first_steps_are_kept(
    run_workflow: Run, tmp_path: Path
) -> None:
    stage = RunPaths(tmp_path / "results" / "again").stage("sft")
    asked = [str(stage.accepted), "--configfile", str(write_overlay(tmp_path, lr=1e-3))]
    assert run_workflow(*asked).returncode == 0
    write_overlay(tmp_path, lr=1e-5)

    refused = run_workflow(*asked)
    assert refused.returncode == 1
    assert "0 of 2 steps ran with the current settings" in refused.stdout
    assert rates(stage.metrics) == [1e-3, 1e-3]
    anew = restart(stage)
    assert anew.returncode == 0, anew.stdout + anew.stderr
    accepted = run_workflow(*asked)

    assert accepted.returncode == 0
    assert "accept sft: PASS" in accepted.stdout
    assert "rule train:" not in accepted.stdout
    assert rates(stage.metrics) == [1e-5, 1e-5]
    assert stage.attempt_numbers() == [1, 2, 3]
    assert rates(stage.attempt(2).replaced / "metrics.jsonl") == [1e-3, 1e-3]
    assert (stage.attempt(2).replaced / "model" / "model.safetensors").is_file()
    assert "Nothing to be done" in run_workflow(*asked).stdout
