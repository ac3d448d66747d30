"""`shakedown status` and `logs` of a run whose jobs wait, run, and outlive their snakemake."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.core.paths import RunPaths
from tests.command import shakedown
from tests.slurm_fixtures import UNTIL_GO, Workflow, wait_for, workflows
from tests.workflow.helpers import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SNAKEFILE = f"""
from pathlib import Path
from shakedown.monitor.workflow import WorkflowRun

onstart:
    WorkflowRun.here(workflow.executor_settings.folder).write(Path("results/demo/workflow.json"))

rule preflight:
    output: "results/demo/preflight/verdict.json"
    log: "results/demo/logs/preflight.log"
    shell: "echo begun on the node; {UNTIL_GO}; touch {{output}}"
"""


@pytest.fixture
def flow(tmp_path: Path, slurm_env: dict[str, str]) -> Iterator[Workflow]:
    with workflows(tmp_path, slurm_env) as make:
        yield make(SNAKEFILE)


def status(flow: Workflow) -> dict[str, Any]:
    done = shakedown("status", flow.folder / "results/demo", "--json", env=flow.environment)
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def until(flow: Workflow, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []

    def look() -> bool:
        seen.append(status(flow))
        return condition(seen[-1])

    wait_for((flow.folder / "results/demo/workflow.json").exists, "the run's begin")
    wait_for(look, what)
    return seen[-1]


def test_a_job_is_told_as_it_waits_runs_outlives_snakemake_and_is_cancelled(
    flow: Workflow,
) -> None:
    blocker = flow.slurm(
        "sbatch", "--parsable", "-N4", "--exclusive", "-t5", "-o/dev/null", "--wrap=sleep 300"
    )
    snakemake = flow.start()
    waiting = until(flow, lambda body: body["state"] == "PENDING", "a job in the queue")
    (job,) = waiting["jobs"]
    assert (job["step"], job["state"], job["nodes"]) == ("preflight", "PENDING", None)
    assert job["reason"] in ("Resources", "Priority", "None")
    # The backfill scheduler plans a start at its next round, 30 s by default.
    planned = until(flow, lambda body: body["jobs"][0]["start"] is not None, "a start estimate")
    assert planned["jobs"][0]["start"] > planned["time"]
    assert "Slurm expects to start it" in planned["sentence"]

    flow.slurm("scancel", blocker.strip())
    running = until(flow, lambda body: body["state"] == "RUNNING", "a job that runs")
    assert running["jobs"][0]["nodes"].startswith("n")
    assert f"job {job['job_id']} is RUNNING on n" in running["sentence"]
    assert running["snakemake"].startswith(f"snakemake (process {snakemake.pid} on ")
    shown = []

    def said() -> bool:
        done = shakedown(
            "logs", flow.folder / "results/demo", "--stage", "preflight", env=flow.environment
        )
        shown.append(done.stdout)
        return f"slurm-{job['job_id']} | begun on the node" in done.stdout

    wait_for(said, "the job's own output")

    flow.kill()
    orphaned = status(flow)
    assert orphaned["state"] == "RUNNING"
    assert orphaned["snakemake"] is None
    assert f"its jobs are not: {job['job_id']}" in orphaned["notes"][0]

    flow.slurm("scancel", job["job_id"])
    ended = until(flow, lambda body: body["state"] == "UNKNOWN", "the end of the job")
    assert f"its job {job['job_id']} has ended: CANCELLED" in ended["sentence"]


def test_the_workflow_tells_where_its_jobs_are(slurm_env: dict[str, str], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "demo")
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump({"results": str(tmp_path)}), encoding="utf-8")
    command = [sys.executable, "-m", "snakemake", str(paths.preflight.accepted), "--nolock"]
    command += ["--profile", "profiles/slurm", "--configfile", str(config)]

    done = subprocess.run(
        command, cwd=ROOT, env=slurm_env, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    shown = shakedown("status", paths.root, "--json", env=slurm_env)
    (job,) = json.loads(shown.stdout)["jobs"]
    assert (job["step"], job["outcome"]) == ("preflight", "succeeded")
