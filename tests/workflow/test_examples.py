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
