"""The closed loop on a real cluster: a node's fault is diagnosed, the stage completes elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shakedown.cluster.nodes import read_bad_nodes
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import read_verdict
from shakedown.preflight.history import records
from tests.workflow.helpers import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# What torch says of a GPU whose memory has failed, on one node and no other.
FAULT = """
import os

if os.environ.get("SLURMD_NODENAME") == {bad!r} and "RANK" in os.environ:
    import torch

    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    torch.optim.AdamW.step = fails
"""


def snakemake(folder: Path, env: dict[str, str], target: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "snakemake", "--nolock", "--profile", "profiles/slurm"]
    done = subprocess.run(
        [*command, "--configfile", str(folder / "run.yaml"), "--", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(folder / "fault")},
        timeout=600,
    )
    print(done.stdout[-8000:])
    return done


def test_a_node_whose_gpu_fails_is_diagnosed_excluded_and_replaced(
    tmp_path: Path, slurm_env: dict[str, str]
) -> None:
    body = {
        "run": "loop",
        "results": str(tmp_path),
        "order": ["sft"],
        "cluster": {"nodes": 2},
        "preflight": {"spare_nodes": 1},
        "stages": {"sft": {"nodes": 2, "allocation": "fsdp:d2", "steps": 3, "eval_samples": 0}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(body))
    (tmp_path / "fault").mkdir()
    run = RunPaths(tmp_path / "loop")
    checked = snakemake(tmp_path, slurm_env, str(run.preflight.accepted))
    good = read_bad_nodes(run.preflight.good_nodes)
    assert checked.returncode == 0
    assert len(good) == 3
    bad = good[0]
    (tmp_path / "fault" / "sitecustomize.py").write_text(FAULT.format(bad=bad))

    first = snakemake(tmp_path, slurm_env, str(run.stage("sft").accepted))
    diagnosis = json.loads(run.stage("sft").diagnosis.read_text())["diagnosis"]
    second = snakemake(tmp_path, slurm_env, str(run.stage("sft").accepted))

    assert first.returncode != 0
    assert (diagnosis["cause"], diagnosis["culprits"]["ranks"]) == ("gpu_error", [0])
    assert read_bad_nodes(run.excluded_nodes) == [bad]
    assert records(run.node_history)[0].node == bad
    assert second.returncode == 0
    assert read_verdict(run.preflight.verdict).extra["good_nodes"] == good
