"""The whole workflow over a lab's own trainer: preflight, stage, diagnosis, gate, page."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shakedown.core.paths import RunPaths
from tests.workflow.helpers import ROOT, Run, read_json

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "data" / "trainers" / "ddp.py"
STEPS = 10


def test_a_run_of_a_foreign_trainer_passes_from_preflight_to_page(
    run_workflow: Run, tmp_path: Path
) -> None:
    stage = {
        "algorithm": "command",
        "launch": "torchrun",
        "command": f"{SCRIPT} --out {{stage}}/checkpoints --steps {STEPS}",
        "ranks_per_node": 2,
        "steps": STEPS,
        "progress": {"pattern": r"step (?P<step>\d+)"},
        "outputs": ["{stage}/checkpoints/step_*"],
    }
    config = tmp_path / "lab.yaml"
    body = {"run": "lab", "results": str(tmp_path / "results"), "stages": {"ddp": stage}}
    config.write_text(yaml.safe_dump(body), encoding="utf-8")

    done = run_workflow("--cores", "2", "--configfile", str(config))

    paths = RunPaths(tmp_path / "results" / "lab")
    assert done.returncode == 0
    assert read_json(paths.stage("ddp").accepted)["status"] == "PASS"
    page = paths.report.read_text(encoding="utf-8")
    assert "loss" in page
    command = [sys.executable, "-m", "shakedown.cli", "status", str(paths.root)]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Every stage passed" in status
    for step in ("serve", "agents", "consistency"):
        assert step not in status
