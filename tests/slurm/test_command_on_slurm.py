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

from shakedown.core.paths import RunPaths, StagePaths
from shakedown.training.demo import write_model
from tests.slurm_fixtures import Workflow, wait_for, workflows
from tests.trainer_pythons import RAY_PYTHON, needs_ray, needs_trainers
from tests.trainer_stages import (
    ACTORS,
    FRONTS,
    TRAINERS,
    first_step_of_rerun,
    outside,
    pids_of_actors,
    trainer_stage,
)
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


def diagnosed(stage: StagePaths) -> dict[str, Any]:
    command = [sys.executable, "-m", "shakedown.cli", "hang", "diagnose", "--stage"]
    subprocess.run([*command, str(stage.root)], check=False, timeout=120)
    found: dict[str, Any] = read_json(stage.diagnosis)
    return found


def fails(
    flow: Workflow, paths: RunPaths, fault: str, pid: Callable[[], int], rank: int = 1
) -> dict[str, Any]:
    """Do that to a rank once step 12 is done, and wait for the stage's end; the diagnosis."""
    stage = paths.stage("lab")
    snakemake = start(flow, paths)
    wait_for(lambda: max(steps(paths), default=0) >= 12, "step 12")
    with outside(fault, pid(), stage, rank):
        assert snakemake.wait(240) == 0, flow.read("snakemake.out")

    assert read_json(stage.outcome)["state"] == ("failed" if fault == "killed" else "hung")
    found = diagnosed(stage)
    wait_for(lambda: not processes_that_mention(f"{flow.folder}/results"), "the end of all ranks")
    return found


def first_step_again(flow: Workflow, paths: RunPaths) -> int:
    """Run the stage alone to its end; returns where it went on."""
    before = len(steps(paths))
    paths.stage("lab").outcome.unlink()
    assert start(flow, paths).wait(240) == 0, flow.read("snakemake.out")
    assert read_json(paths.stage("lab").outcome)["state"] == "completed"
    return first_step_of_rerun(steps(paths)[before:])


TORCHRUN = {"launch": "torchrun", "command": f"{STAGE['command']} --cache {{stage}}/cache"}
SRUN = {"launch": "srun", "command": f"{FRONTS['srun']}{TORCHRUN['command']}"}
# A lab's own launch lines: of srun over all nodes of the job, and of torchrun on one.
OWN_SRUN = {
    "launch": "none",
    "command": f"{SCRIPT.with_name('ranks.sh')} {{head}} {{port}} {SRUN['command']}",
}
OWN_TORCHRUN = {
    "launch": "none",
    "command": FRONTS["none"] + STAGE["command"],
    "nodes": 1,
    "ranks_per_node": 2,
}


@pytest.mark.parametrize(
    ("launch", "fault", "culprit"),
    [
        pytest.param(TORCHRUN, "stopped", 1, id="torchrun"),
        *(
            pytest.param(launch, fault, rank, id=name, marks=pytest.mark.exhaustive)
            for name, launch, fault, rank in (
                ("torchrun-loop", TORCHRUN, "loop", 1),
                ("torchrun-lock", TORCHRUN, "lock", 1),
                ("srun", SRUN, "stopped", 1),
                ("srun-first", SRUN, "stopped", 0),
                ("srun-loop", SRUN, "loop", 1),
                ("srun-lock", SRUN, "lock", 1),
                ("none", OWN_SRUN, "stopped", 1),
                ("none-loop", OWN_SRUN, "loop", 1),
                ("none-lock", OWN_SRUN, "lock", 1),
                ("none-one-node", OWN_TORCHRUN, "stopped", 1),
            )
        ),
    ],
)
def test_a_hung_rank_is_named_and_the_stage_resumes_alone(
    workflow: Make, launch: dict[str, Any], fault: str, culprit: int
) -> None:
    flow = workflow("")
    paths = prepare(flow, **launch)

    found = fails(flow, paths, fault, lambda: pid_of_rank(culprit, flow.folder), culprit)

    assert found["diagnosis"]["culprits"] == {"ranks": [culprit], "nodes": [], "roles": []}, found
    assert found["diagnosis"]["victims"]["ranks"] == [1 - culprit]
    assert fault == "stopped" or "read_cache (cache.py:" in found["summary"], found["summary"]

    begin = first_step_again(flow, paths)
    assert begin > 10
    assert begin % 5 == 1
    outcome = read_json(paths.stage("lab").outcome)
    assert len(outcome["nodes"]) == launch.get("nodes", 2)


@needs_trainers
@pytest.mark.exhaustive
@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize("fault", ["stopped", "loop", "lock", "killed"])
def test_an_unmodified_trainer_over_two_nodes_is_diagnosed_and_goes_on_from_its_checkpoint(
    workflow: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, fault: str
) -> None:
    write_model(tmp_path / "model", seed=0)
    flow = workflow("")
    monkeypatch.setitem(flow.environment, "HF_HUB_OFFLINE", "1")
    paths = prepare(flow, **trainer_stage(trainer, tmp_path / "model"))

    found = fails(flow, paths, fault, lambda: pid_of_rank(1, flow.folder))

    assert found["diagnosis"]["culprits"] == {"ranks": [1], "nodes": [], "roles": []}, found
    if fault in ("loop", "lock"):
        assert "read_cache (cache.py:" in found["summary"], found["summary"]

    assert first_step_again(flow, paths) >= 10
    assert len(read_json(paths.stage("lab").outcome)["nodes"]) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", [TORCHRUN, SRUN, OWN_SRUN], ids=["torchrun", "srun", "none"])
def test_the_signal_of_the_stage_reaches_the_ranks_of_both_nodes_and_the_job_goes_on(
    workflow: Make, launch: dict[str, Any]
) -> None:
    flow = workflow("")
    command = f"{launch['command']} --save-on SIGUSR1"
    paths = prepare(flow, **{**launch, "command": command}, signal="SIGUSR1")
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
    logs = [p.read_text() for p in stage.attempt(1).logs.rglob("*") if p.is_file()]
    for rank in (0, 1):
        assert any(f"rank {rank} was told to stop" in log for log in logs)


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
    # The last step's; Ray may write a warning of its own behind it.
    pids = {int(word) for word in log.rpartition("nodes=")[2].splitlines()[0].split()[1:]}
    wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in pids), "the end of the actors")


@needs_ray
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["stopped", "loop", "lock", "killed"])
def test_an_actor_of_ray_is_named_by_class_and_rank_or_process_and_a_rerun_goes_on(
    workflow: Make, fault: str
) -> None:
    flow = workflow("")
    paths = prepare(flow, **{**ACTORS, "command": f"{ACTORS['command']} --steps {STEPS}"})
    stage = paths.stage("lab")
    pids: list[int] = []

    def of_the_last() -> int:
        pids.extend(pids_of_actors(stage))
        return pids[3]

    found = fails(flow, paths, fault, of_the_last, rank=3)

    # The others end with the driver, and with them what tells the rank of one that was killed.
    killed = fault == "killed"
    assert found["diagnosis"]["culprits"] == {
        "ranks": [] if killed else [3],
        "nodes": [],
        "roles": [f"actor PolicyWorker process {pids[3]}"] if killed else [],
    }
    assert killed or f"rank 3 is actor PolicyWorker, process {pids[3]}" in found["summary"]
    wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in pids), "the end of the actors")

    begin = first_step_again(flow, paths)
    assert begin > 5
    assert begin % 5 == 1
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    assert "ray: 2 of 2 node(s) have joined" in log
    assert "4 policy workers on 2 node(s)" in log


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", [TORCHRUN, SRUN, OWN_SRUN], ids=["torchrun", "srun", "none"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_on_either_node(
    workflow: Make, launch: dict[str, Any], rank: int
) -> None:
    flow = workflow("")
    paths = prepare(flow, **launch)
    stage = paths.stage("lab")
    snakemake = start(flow, paths)
    wait_for(lambda: max(steps(paths), default=0) >= 3, "the third step")
    os.kill(pid_of_rank(rank, flow.folder), signal.SIGKILL)

    assert snakemake.wait(240) == 0, flow.read("snakemake.out")
    found = diagnosed(stage)
    assert found["diagnosis"]["culprits"] == {"ranks": [rank], "nodes": [], "roles": []}, found
    # By torchrun's word, or by srun's.
    assert re.search("signal 9|Killed", found["summary"]), found["summary"]
    wait_for(lambda: not processes_that_mention(f"{flow.folder}/results"), "the end of all ranks")
