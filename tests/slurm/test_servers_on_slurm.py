"""A GRPO stage whose servers stand on both nodes of a real Slurm: one policy, two real vLLMs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.core.outcome import read_outcome
from shakedown.core.paths import RunPaths
from tests.demo_assets import write_assets
from tests.workflow.helpers import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.vllm, pytest.mark.exhaustive]

STEPS = 3
# Something to be learned from answers by chance: every version then differs from the one before.
REWARD = "def reward(completion, answer):\n    return float(len(completion) % 3)\n"
CONFIG: dict[str, Any] = {
    "run": "r",
    "order": ["grpo"],
    "cluster": {"nodes": 2},
    "serve": {"nodes": 2, "kv_cache_gb": 0.1},
    "stages": {
        "grpo": {
            "algorithm": "grpo",
            "allocation": "fsdp:d2",
            "nodes": 2,
            "steps": STEPS,
            "batch_size": 8,
            "eval_samples": 8,
            "optimizer": {"lr": 0.001},
            "grpo": {"group_size": 4, "max_tokens": 8, "async_level": 1},
        }
    },
}


def test_rollouts_are_dealt_to_both_servers_and_each_proves_every_version(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "r")
    (tmp_path / "assets").mkdir()
    assets = write_assets(tmp_path / "assets") / "assets.json"
    (tmp_path / "reward.py").write_text(REWARD)
    data = {"reward": f"{tmp_path / 'reward.py'}:reward"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "data": data, "results": str(tmp_path)}))
    command = [sys.executable, "-m", "shakedown.cli", "train", "grpo", "--config", str(config)]
    command += ["--assets", str(assets), "--run-dir", str(paths.root)]

    done = subprocess.run(
        ["salloc", "--nodes=2", "--ntasks-per-node=1", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=slurm_env,
        timeout=600,
    )

    stage = paths.stage("grpo")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert read_outcome(stage.outcome).state == "completed"
    log = (stage.latest / "logs" / "orchestrator.log").read_text()
    answered = re.findall(r"server at http://\S+: (\d+) requests answered", log)
    assert len(answered) == 2, log
    assert all(int(count) >= STEPS for count in answered), log
    rows = [json.loads(line) for line in stage.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["rollout_server_version"] > 0, "both have proven a version of the trainer's"
    assert all(row["on_policy_k3"] < 1e-6 for row in rows), "each answers with the one it says"
