"""A command as a stage over two nodes of a real Slurm: torchrun's rendezvous, stacks, resume."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shakedown.core.paths import RunPaths
from shakedown.training.demo import write_model
from tests.slurm_fixtures import Workflow, wait_for, workflows
from tests.trainer_pythons import RAY_PYTHON, needs_ray, needs_trainers
from tests.trainer_stages import TRAINERS, first_step_of_rerun, trainer_stage
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

Make = Callable[[str], Workflow]
SCRIPT = ROOT / "tests" / "data" / "trainers" / "ddp.py"
STEPS = 40
STAGE: dict[str, Any] = {
    "algorithm": "command",
    "command": f"{SCRIPT} --resume {{resume}} --out {{stage}}/checkpoints --steps {STEPS}",
    "nodes": 2,
    "steps": STEPS,
    "progress": {"pattern": r"step (?P<step>\d+)"},
    "resume": {"glob": "{stage}/checkpoints/step_*.pt"},
    "outputs": ["{stage}/checkpoints"],
    "stall_timeout": 15.0,
    "start_timeout": 120.0,
}


@pytest.fixture
def workflow(tmp_path: Path, slurm_env: dict[str, str]) -> Iterator[Make]:
    with workflows(tmp_path, slurm_env) as make:
        yield make


def prepare(flow: Workflow, **changes: Any) -> RunPaths:
    """The repository's workflow with everything before the stage in place."""
    paths = RunPaths(flow.folder / "results" / "r")
    body = {"run": "r", "results": str(flow.folder / "results"), "cluster": {"nodes": 2}}
    body["stages"] = {"lab": {**STAGE, **changes}}
    (flow.folder / "config.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")
    paths.preflight.root.mkdir(parents=True)
    paths.preflight.accepted.write_text("{}")
    return paths


def start(flow: Workflow, paths: RunPaths, *more: str) -> "subprocess.Popen[bytes]":
    return flow.start(
        "--submitit-keep-successful-logs",
        *more,
        *("--snakefile", str(ROOT / "workflow" / "Snakefile")),
        *("--configfile", str(flow.folder / "config.yaml"), "--allowed-rules", "train"),
        *("--", str(paths.stage("lab").outcome)),
    )


def steps(paths: RunPaths) -> list[int]:
    metrics = paths.stage("lab").metrics
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


def pid_of_rank(rank: int, folder: Path) -> int:
    for line in processes_that_mention(f"{folder}/results"):
        pid, _, command = line.partition(" ")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment and "-u" in command.split():
            return int(pid)
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.exhaustive
def test_torchrun_over_two_nodes_completes_and_one_log_a_rank_is_shown(workflow: Make) -> None:
    flow = workflow("")
    paths = prepare(flow, launch="torchrun")

    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")

    outcome = read_json(paths.stage("lab").outcome)
    assert (outcome["state"], outcome["steps"]) == ("completed", STEPS)
    assert len(set(outcome["rank_nodes"])) == 2
    assert steps(paths) == list(range(1, STEPS + 1))
    command = [sys.executable, "-m", "shakedown.cli", "logs", str(paths.root), "--stage", "lab"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^trainer-rank0-stdout +\| step {STEPS} loss=", shown, re.MULTILINE)
    assert not processes_that_mention(f"{flow.folder}/results")


def stop_second_rank(flow: Workflow, paths: RunPaths, step: int) -> dict[str, Any]:
    """Stop it once that step is done, and wait for the stage's end; returns the diagnosis."""
    stage = paths.stage("lab")
    snakemake = start(flow, paths)
    wait_for(lambda: max(steps(paths), default=0) >= step, f"step {step}")
    os.kill(pid_of_rank(1, flow.folder), signal.SIGSTOP)

    assert snakemake.wait(240) == 0, flow.read("snakemake.out")
    assert read_json(stage.outcome)["state"] == "hung"
    command = [sys.executable, "-m", "shakedown.cli", "hang", "diagnose", "--stage"]
    subprocess.run([*command, str(stage.root)], check=False, timeout=120)
    wait_for(lambda: not processes_that_mention(f"{flow.folder}/results"), "the end of all ranks")
    found: dict[str, Any] = read_json(stage.diagnosis)["diagnosis"]
    return found


def test_a_stopped_rank_of_the_second_node_is_named_and_the_stage_resumes_alone(
    workflow: Make,
) -> None:
    flow = workflow("")
    paths = prepare(flow, launch="torchrun")
    stage = paths.stage("lab")

    found = stop_second_rank(flow, paths, 12)

    assert found["culprits"]["ranks"] == [1], found
    assert found["victims"]["ranks"] == [0]

    stage.outcome.unlink()
    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")

    assert read_json(stage.outcome)["state"] == "completed"
    (log,) = stage.attempt(2).logs.glob("torchrun-1/*/attempt_0/0/stdout.log")
    assert int(log.read_text().split()[-1]) > 10


@needs_trainers
@pytest.mark.exhaustive
@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_an_unmodified_trainer_over_two_nodes_is_diagnosed_and_goes_on_from_its_checkpoint(
    workflow: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    write_model(tmp_path / "model", seed=0)
    flow = workflow("")
    monkeypatch.setitem(flow.environment, "HF_HUB_OFFLINE", "1")
    paths = prepare(flow, **trainer_stage(trainer, tmp_path / "model"))
    stage = paths.stage("lab")

    found = stop_second_rank(flow, paths, 13)

    assert (found["state"], found["culprits"]["ranks"]) == ("hung", [1]), found
    assert found["victims"]["ranks"] == [0]

    stage.outcome.unlink()
    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")

    outcome = read_json(stage.outcome)
    assert outcome["state"] == "completed", outcome
    assert len(set(outcome["rank_nodes"])) == 2
    assert first_step_of_rerun(steps(paths)) >= 10


@pytest.mark.exhaustive
def test_the_signal_of_the_stage_reaches_the_ranks_of_both_nodes_and_the_job_goes_on(
    workflow: Make,
) -> None:
    flow = workflow("")
    command = f"{STAGE['command']} --save-on SIGUSR1"
    paths = prepare(flow, launch="torchrun", command=command, signal="SIGUSR1")
    stage = paths.stage("lab")
    more = ("--set-resources", "train:checkpoint_seconds=60")
    snakemake = start(flow, paths, *more)

    wait_for(lambda: max(steps(paths), default=0) >= 3, "the third step")
    (entry,) = flow.submitted()
    # What `--signal=B:USR2@N` does before a time limit.
    flow.slurm("scancel", "--batch", "--signal=USR2", entry["job_id"])

    assert snakemake.wait(240) == 0, flow.read("snakemake.out")
    first, second = read_json(stage.attempt(1).outcome), read_json(stage.outcome)
    assert (first["state"], second["state"]) == ("interrupted", "completed")
    assert "resume from" in first["sentence"]
    for node in (0, 1):
        (log,) = stage.attempt(1).logs.glob(f"torchrun-{node}/*/attempt_0/0/stdout.log")
        assert f"rank {node} was told to stop" in log.read_text()


def test_srun_starts_one_task_a_rank(workflow: Make) -> None:
    flow = workflow("")
    command = f"{sys.executable} -u {STAGE['command']}"
    paths = prepare(flow, launch="srun", command=command)

    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")

    stage = paths.stage("lab")
    assert read_json(stage.outcome)["state"] == "completed"
    assert f"step {STEPS} " in stage.latest.joinpath("logs", "trainer-rank0.log").read_text()
    assert stage.latest.joinpath("logs", "trainer-rank1.log").exists()


@needs_ray
def test_ray_waits_for_both_nodes_and_all_of_it_ends(workflow: Make) -> None:
    flow = workflow("")
    command = f"python {SCRIPT.with_name('actors.py')} {STEPS}"
    ray = {"launch": "ray", "python": RAY_PYTHON, "command": command}
    paths = prepare(flow, **ray, resume=None, outputs=[])

    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")

    stage = paths.stage("lab")
    assert read_json(stage.outcome)["state"] == "completed"
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    assert "ray: 2 of 2 node(s) have joined" in log
    assert "living nodes: 2" in log
    pids = {int(word) for word in log.splitlines()[-1].split("nodes=")[1].split()[1:]}
    wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in pids), "the end of the actors")


@needs_ray
@pytest.mark.exhaustive
def test_a_stopped_actor_of_ray_is_named_by_class_and_rank_and_a_rerun_completes(
    workflow: Make,
) -> None:
    flow = workflow("")
    command = f"python {SCRIPT.with_name('policy_actors.py')} --steps {STEPS}"
    ray = {"launch": "ray", "python": RAY_PYTHON, "command": command, "start_timeout": 240.0}
    paths = prepare(flow, **ray, resume=None, outputs=[])
    stage = paths.stage("lab")
    snakemake = start(flow, paths)

    wait_for(lambda: max(steps(paths), default=0) >= 3, "the third step")
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    pids = [int(word) for word in log.splitlines()[-1].partition("pids=")[2].split()]
    os.kill(pids[3], signal.SIGSTOP)

    assert snakemake.wait(240) == 0, flow.read("snakemake.out")
    command_line = [sys.executable, "-m", "shakedown.cli", "hang", "diagnose", "--stage"]
    subprocess.run([*command_line, str(stage.root)], check=False, timeout=120)
    found = read_json(stage.diagnosis)
    assert found["diagnosis"]["state"] == "hung"
    assert found["diagnosis"]["culprits"] == {"ranks": [3], "nodes": [], "roles": []}
    assert f"rank 3 is actor PolicyWorker, process {pids[3]}" in found["summary"]
    wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in pids), "the end of the actors")

    stage.outcome.unlink()
    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")

    assert read_json(stage.outcome)["state"] == "completed"
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    assert "ray: 2 of 2 node(s) have joined" in log
    assert "4 policy workers on 2 node(s)" in log
