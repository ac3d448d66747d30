"""Slurm's warning on a real cluster: the work is saved, the job goes back under its id, resumes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.config import load_config
from shakedown.core.paths import RunPaths
from shakedown.monitor.heartbeat import read_heartbeats
from tests.slurm_fixtures import Workflow, wait_for, workflows
from tests.workflow.helpers import ROOT, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]
# Works for ever the first time; a trap is what a stage's own handler is.
SAVES = (
    "if [ -e saved ]; then echo \\$(cat saved) then $SLURM_RESTART_COUNT > {output}; exit; fi; "
    "trap 'echo attempt ${{SLURM_RESTART_COUNT:-0}} > saved; exit 75' USR2; "
    "touch up; while :; do sleep 0.1; done"
).replace("\\$", "$")
STAGE = {"nodes": 2, "steps": 150, "batch_size": 16, "eval_samples": 0, "checkpoint_every": 1000}


@pytest.fixture
def workflow(tmp_path: Path, slurm_env: dict[str, str]) -> Iterator[Make]:
    with workflows(tmp_path, slurm_env) as make:
        yield make


def restarts(flow: Workflow, job_id: str) -> str:
    shown = flow.slurm("scontrol", "show", "job", job_id)
    return shown.partition("Restarts=")[2].split()[0]


def warn(flow: Workflow, job_id: str) -> None:
    """What `--signal=B:USR2@N` does before a time limit."""
    flow.slurm("scancel", "--batch", "--signal=USR2", job_id)


@pytest.mark.exhaustive
def test_a_job_over_its_time_limit_saves_is_requeued_and_resumes(workflow: Make) -> None:
    resources = "runtime=1, checkpoint_seconds=5"
    flow = workflow(f'rule a:\n output: "a.txt"\n resources: {resources}\n shell: {SAVES!r}\n')

    done = flow.run()

    (entry,) = flow.submitted()
    assert done.returncode == 0
    assert flow.read("a.txt") == "attempt 0 then 1\n"
    assert restarts(flow, entry["job_id"]) == "1"


def test_a_job_that_is_warned_at_its_limit_fails_and_says_so(workflow: Make) -> None:
    flow = workflow(
        'rule a:\n output: "a.txt"\n resources: checkpoint_seconds=60\n'
        " shell: \"trap 'exit 75' USR2; touch up${{SLURM_RESTART_COUNT:-}};"
        ' while :; do sleep 0.1; done"\n'
    )
    snakemake = flow.start("--submitit-requeue-limit", "1")

    wait_for((flow.folder / "up").exists, "the first run")
    (entry,) = flow.submitted()
    warn(flow, entry["job_id"])
    wait_for((flow.folder / "up1").exists, "the run after the requeue")
    warn(flow, entry["job_id"])

    assert snakemake.wait(60) == 1
    assert "requeued 1 times, the limit" in flow.read("snakemake.out")
    assert not (flow.folder / "up2").exists()


def stage_workflow(flow: Workflow) -> RunPaths:
    """The repository's workflow with everything before the stage `sft` in place."""
    paths = RunPaths(flow.folder / "results" / "requeue")
    body: dict[str, Any] = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "requeue", "results": str(flow.folder / "results"), "order": ["sft"]}
    body["cluster"]["nodes"] = 2
    body["data"] |= {"train_size": 500, "heldout_size": 50}
    body["stages"] = {"sft": body["stages"]["sft"] | STAGE}
    config = flow.folder / "config.yaml"
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    command = [sys.executable, "-m", "shakedown.cli", "assets", "--config", str(config)]
    subprocess.run([*command, "--out", str(paths.assets.root)], check=True, timeout=120)
    paths.preflight.root.mkdir(parents=True)
    paths.preflight.accepted.write_text("{}")
    return paths


def test_a_training_stage_over_two_nodes_saves_is_requeued_and_resumes(workflow: Make) -> None:
    flow = workflow("")
    paths = stage_workflow(flow)
    stage = paths.stage("sft")
    snakemake = flow.start(
        "--submitit-keep-successful-logs",
        *("--snakefile", str(ROOT / "workflow" / "Snakefile")),
        *("--configfile", str(flow.folder / "config.yaml"), "--allowed-rules", "train"),
        *("--set-resources", "train:checkpoint_seconds=60", "--", str(stage.outcome)),
    )

    beats = stage.attempt(1).heartbeats
    wait_for(lambda: any(beat.step >= 3 for beat in read_heartbeats(beats)), "the third step")
    (entry,) = flow.submitted()
    warn(flow, entry["job_id"])

    assert snakemake.wait(300) == 0, flow.read("snakemake.out")
    first = read_json(stage.attempt(1).outcome)
    second = read_json(stage.outcome)
    assert (first["state"], second["state"], second["attempt"]) == ("interrupted", "completed", 2)
    saved = first["sentence"].rpartition(" ")[2]
    assert first["sentence"] == (
        f"stopped by SIGUSR2, state saved; run the same command again to resume after step {saved}"
    )
    resumed = stage.attempt(2).log("trainer-rank0").read_text(encoding="utf-8")
    assert f"resuming from step_{int(saved):06d}" in resumed
    rows = [json.loads(line) for line in stage.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STAGE["steps"] + 1))
    assert restarts(flow, entry["job_id"]) == "1"
    assert stage.attempt(1).log("trainer-rank1").exists()
    (log,) = flow.folder.glob(".snakemake/submitit/logs/rule_train/*/*.log")
    for attempt in ("attempt 001", "attempt 002"):
        assert f"{attempt}: 2 trainer rank(s) on n" in log.read_text(encoding="utf-8")
