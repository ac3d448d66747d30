"""The examples for a cluster are planned by the workflow as they lie there."""

from pathlib import Path

import pytest

from tests.workflow.helpers import ROOT, Run


@pytest.mark.parametrize("name", ["qwen3-2x8-h100", "qwen3-2x8-h100-megatron"])
def test_a_cluster_example_is_planned(run_workflow: Run, tmp_path: Path, name: str) -> None:
    example = ROOT / "config" / "examples" / f"{name}.yaml"

    done = run_workflow("-n", "--configfile", str(example), "--config", f"results={tmp_path}")

    assert done.returncode == 0
    assert "gpu_model=h100" in done.stdout
    assert done.stdout.count("nodes=2, gpu=16") == 3  # preflight and both stages
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["verl", "nemo-rl", "areal", "prime-rl", "trl"])
def test_an_example_of_a_foreign_trainer_is_planned_without_server_and_agents(
    run_workflow: Run, tmp_path: Path, name: str
) -> None:
    example = ROOT / "config" / "examples" / f"{name}.yaml"

    done = run_workflow("-n", "--configfile", str(example), "--config", f"results={tmp_path}")

    assert done.returncode == 0
    for rule in ("preflight", "train", "diagnose", "accept_stage", "report_page"):
        assert f"rule {rule}:" in done.stdout
    for rule in ("serve", "agents", "consistency", "assets"):
        assert f"rule {rule}:" not in done.stdout
    assert not list(tmp_path.iterdir())
