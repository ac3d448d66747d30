"""A stage over two nodes of a real cluster: matching ranks leave their traces in the run."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.paths import AttemptPaths, RunPaths
from shakedown.profiling.profiles import read_records
from tests.demo_assets import write_assets
from tests.workflow.helpers import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

STAGE = {"nodes": 2, "steps": 4, "batch_size": 8, "eval_samples": 0, "checkpoint_every": 50}


@pytest.mark.exhaustive
def test_ranks_on_both_nodes_are_matched_by_their_names_there(
    tmp_path: Path, slurm_env: dict[str, str]
) -> None:
    assets = write_assets(tmp_path) / "assets.json"
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "run", "results": str(tmp_path), "order": ["sft"]}
    body["cluster"]["nodes"] = 2
    asked = {"workers": "trainer-rank[13]", "steps": "2:4"}
    changes = STAGE | {"allocation": "fsdp:d4", "profile": asked}
    body["stages"] = {"sft": body["stages"]["sft"] | changes}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "train", "sft", "--config", str(config)]

    log = tmp_path / "job.out"
    job = ["sbatch", "--wait", "--nodes=2", f"--output={log}"]

    done = subprocess.run(
        [*job, f"--wrap={shlex.join([*command, '--assets', str(assets)])}"],
        env=slurm_env,
        timeout=300,
        check=False,
    )

    attempt = AttemptPaths(RunPaths(tmp_path / "run").stage("sft").latest)
    records, faults = read_records(attempt.profiles)
    assert done.returncode == 0, log.read_text(encoding="utf-8")
    assert not faults
    assert sorted(each.component for each in records) == ["trainer-rank1", "trainer-rank3"]
    assert len({each.host for each in records}) == 2
    assert [(file.first, file.last) for each in records for file in each.files] == [(2, 3), (2, 3)]
    assert all(each.ended for each in records)
