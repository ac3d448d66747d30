"""A node that is lost with all that runs on it, under a command stage and under a watch."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import private_slurm
import pytest
import yaml
from private_slurm import control

from shakedown.core.paths import RunPaths
from shakedown.training.demo import write_model
from tests.slurm.test_command_on_slurm import (
    STAGE,
    diagnosed,
    first_step_again,
    prepare,
    start,
    steps,
)
from tests.slurm_fixtures import Workflow, environment, private_cluster, wait_for, workflows
from tests.trainer_pythons import needs_ray, needs_trainers
from tests.trainer_stages import ACTORS, FRONTS, TRAINERS, trainer_stage
from tests.watches import Watch
from tests.workflow.helpers import ROOT, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.exhaustive]

SCRIPT = ROOT / "tests" / "data" / "trainers" / "ddp.py"


@pytest.fixture(scope="module")
def cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """Slurm gives a silent node up after 40 s: whoever looks before that sees the job running."""
    with private_cluster(nodes=4, cpus=4, settings=["SlurmdTimeout=40"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def variables(cluster: private_slurm.Cluster) -> dict[str, str]:
    return {**environment(cluster), "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def workflow(tmp_path: Path, variables: dict[str, str]) -> Iterator[Callable[[str], Workflow]]:
    with workflows(tmp_path, variables) as make:
        yield make


class Lab:
    """Batch jobs over two nodes, the second of which is lost."""

    def __init__(self, folder: Path, cluster: private_slurm.Cluster, variables: dict[str, str]):
        self.folder, self.environment, self._cluster = folder, variables, cluster
        self.job = ""

    def run(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def submit(self, script: str, *options: str) -> Path:
        """Returns its output file."""
        path, out = self.folder / "job.sh", self.folder / "job.log"
        path.write_text(f"#!/bin/bash\n{script}\n")
        self.job = self.run("sbatch", "--parsable", "-N2", *options, "-o", str(out), str(path))
        return out

    def state(self) -> str:
        return self.run("squeue", "-h", "-o", "%T", "-j", self.job)

    @contextmanager
    def lost_node(self) -> Iterator[str]:
        """The second node of the only job that runs; it comes back at the end."""
        nodes = self.run("squeue", "-h", "-t", "R", "-o", "%N")
        name = self.run("scontrol", "show", "hostnames", nodes).split()[1]
        control.lose(self._cluster.plan.folder, f"slurmd-{name}")
        try:
            yield name
        finally:
            control.start(self._cluster.plan.folder, f"slurmd-{name}")
            wait_for(lambda: "down" not in self.run("sinfo", "-h", "-o", "%T"), "the node")


@pytest.fixture
def lab(tmp_path: Path, cluster: private_slurm.Cluster, variables: dict[str, str]) -> Iterator[Lab]:
    made = Lab(tmp_path, cluster, variables)
    yield made
    subprocess.run(["scancel", "--me"], env=variables, check=False)
    wait_for(lambda: not made.run("squeue", "-h"), "an empty queue")


TRAINERS_ON_TORCH = [
    "torchrun",
    "srun",
    *(pytest.param(name, marks=needs_trainers) for name in TRAINERS),
]
ACTORS_OF_RAY = pytest.param("actors", marks=needs_ray)


def stage_of(trainer: str, folder: Path) -> dict[str, Any]:
    if trainer in ("torchrun", "srun"):
        return {**STAGE, "launch": trainer, "command": FRONTS[trainer] + STAGE["command"]}
    if trainer == "actors":
        return {**STAGE, **ACTORS, "command": f"{ACTORS['command']} --steps 40"}
    write_model(folder / "model", seed=0)
    return {**STAGE, **trainer_stage(trainer, folder / "model")}


# Of Ray the driver fails as soon as an actor's connection does.
@pytest.mark.parametrize("trainer", TRAINERS_ON_TORCH)
def test_the_workflow_goes_on_from_the_checkpoint_without_the_lost_node(
    workflow: Callable[[str], Workflow], lab: Lab, trainer: str
) -> None:
    flow = workflow("")
    # Slurm is to be the first to see it.
    paths = prepare(flow, **{**stage_of(trainer, lab.folder), "stall_timeout": 100.0})
    snakemake = start(flow, paths)
    wait_for(lambda: max(steps(paths), default=0) >= 12, "step 12")

    with lab.lost_node() as lost:
        assert snakemake.wait(240) == 0, flow.read("snakemake.out")

    outcome = read_json(paths.stage("lab").outcome)
    assert outcome["state"] == "completed"
    assert lost not in outcome["nodes"]
    assert f"lost {lost}: excluded for the rest of this run" in flow.read("snakemake.out")
    assert "resuming from" in paths.logs.joinpath("train_lab.log").read_text()


@pytest.mark.parametrize("trainer", [*TRAINERS_ON_TORCH, ACTORS_OF_RAY])
def test_where_the_stage_ends_first_the_node_is_named_and_the_next_try_keeps_off_it(
    workflow: Callable[[str], Workflow], lab: Lab, trainer: str
) -> None:
    flow = workflow("")
    paths = prepare(flow, **stage_of(trainer, lab.folder))
    snakemake = start(flow, paths)
    wait_for(lambda: max(steps(paths), default=0) >= 12, "step 12")

    with lab.lost_node() as lost:
        assert snakemake.wait(240) == 0, flow.read("snakemake.out")
        assert read_json(paths.stage("lab").outcome)["state"] in ("hung", "failed")
        found = diagnosed(paths.stage("lab"))
        begin = first_step_again(flow, paths)

    assert found["diagnosis"]["cause"] == "node_dead", found
    assert found["diagnosis"]["culprits"] == {"ranks": [], "nodes": [lost], "roles": []}
    # Which actors were there Ray alone knows.
    assert ("it ran rank 1" in found["summary"]) == (trainer != "actors")
    assert begin > 5
    again = read_json(paths.stage("lab").outcome)
    assert lost not in again["nodes"]
    assert len(again["rank_nodes"]) == (0 if trainer == "actors" else 2)


def test_a_stage_of_ones_own_batch_job_names_the_lost_node(lab: Lab) -> None:
    stage = stage_of("torchrun", lab.folder)
    body = {
        "run": "r",
        "results": str(lab.folder),
        "cluster": {"nodes": 2},
        "stages": {"lab": stage},
    }
    (lab.folder / "lab.yaml").write_text(yaml.safe_dump(body))
    paths = RunPaths(lab.folder / "r")
    shakedown = f"{sys.executable} -m shakedown.cli"
    out = lab.submit(
        f"{shakedown} train lab --config {lab.folder}/lab.yaml; echo ended with $?\n"
        f"{shakedown} hang diagnose --stage {paths.stage('lab').root}",
        "--no-kill",
    )
    wait_for(lambda: max(steps(paths), default=0) >= 12, "step 12")

    with lab.lost_node() as lost:
        wait_for(lambda: not lab.state(), "the end of the job")

    assert "ended with 1" in out.read_text()
    found = read_json(paths.stage("lab").diagnosis)["diagnosis"]
    assert (found["cause"], found["culprits"]) == (
        "node_dead",
        {"ranks": [], "nodes": [lost], "roles": []},
    )


def test_a_watch_names_the_lost_node_and_follows_the_requeued_job(lab: Lab) -> None:
    out = lab.submit(
        f"srun {sys.executable} -m torch.distributed.run --nnodes=2 --rdzv-backend=c10d"
        f" --rdzv-endpoint=127.0.0.1:$((20000 + RANDOM % 9000))"
        f" {SCRIPT} --out {lab.folder}/saved --steps 4000",
        "--ntasks-per-node=1",
    )
    wait_for(lambda: out.exists() and out.read_text().count("step ") > 5, "the first steps")
    options = ["--interval", "2", "--patience", "15", "--stall", "60"]
    folder = str(lab.folder / "watch")

    with Watch("--job", lab.job, *options, "--out", folder, env=lab.environment) as watch:
        watch.until("2 ranks")
        with lab.lost_node() as lost:
            alarm = watch.until("ALARM")
            again = watch.until("2 ranks")
            wait_for(lambda: out.read_text().count("step ") > 50, "steps of the second run")
        lab.run("scancel", lab.job)
        end = watch.until("ALARM ended")
        code = watch.code()

    assert f"suspect: no look at {lost}" in alarm[-2]
    assert f"ALARM hung: node {lost} failed; it ran rank " in alarm[-1]
    assert any("is PENDING; nothing to look at" in each for each in again)
    assert lost not in again[-1]
    assert not any("suspect" in each for each in again + end), "it could not move while it waited"
    assert "CANCELLED" in end[-1]
    assert code == 1
