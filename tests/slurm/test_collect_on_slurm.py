"""A job's and a stage's collection on a real cluster: every node, and what a dead one leaves."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import private_slurm
import pytest
from private_slurm import control

from shakedown.cluster.supervise import Supervisor
from shakedown.config import load_config
from shakedown.core.paths import AttemptPaths
from shakedown.diagnosis.read import read_paths
from shakedown.diagnosis.records import NodeState, Stack
from shakedown.progress.movement import Movement
from shakedown.training.stage.builtin_stage import OwnLaunched
from shakedown.training.stage.evidence import collect_evidence, note_lost_nodes
from shakedown.training.stage.job import StageJob
from tests.slurm_fixtures import PATIENCE, environment, private_cluster, wait_for
from tests.workflow.helpers import ROOT, read_json

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RANK = """
import os, sys, time
from pathlib import Path
from shakedown.monitor.heartbeat import Heartbeat
beats = Heartbeat(Path(sys.argv[1]), int(os.environ["SLURM_PROCID"]))
beats.beat(phase="train", step=3)
def stands_here():
    print('ready', flush=True)
    time.sleep(600)
stands_here()
"""


@dataclass
class Job:
    """Four sleeping ranks on four nodes, started by srun in a batch script."""

    folder: Path
    environment: dict[str, str]
    job_id: str = ""

    def slurm(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start_collecting(self, out: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "shakedown.cli", "hang", "collect", "--job", self.job_id]
        return subprocess.Popen(
            [*command, "--out", str(out), "--gap", "0.1", "--rounds", "2"],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def collect(self, out: Path) -> str:
        """What the command says; it exits 0."""
        process = self.start_collecting(out)
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        return said

    def launched(self) -> OwnLaunched:
        stage = load_config(ROOT / "config" / "config.yaml").own_stages["sft"]
        root = str(self.attempt.root)
        made = StageJob("sft", stage, "m", "float32", "t", "h", "r", 0, 4, root, root)
        return OwnLaunched(made, [], [], [], {})

    @property
    def attempt(self) -> AttemptPaths:
        return AttemptPaths(self.folder / "001")

    def nodes(self) -> list[str]:
        names = self.slurm("squeue", "-h", "-j", self.job_id, "-o", "%N")
        return self.slurm("scontrol", "show", "hostnames", names).split()

    def state(self) -> str:
        return self.slurm("scontrol", "show", "job", self.job_id).partition("JobState=")[2][:9]


@pytest.fixture(scope="module")
def cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """A cluster of its own, whose clients wait 2 s, not 10 s, for a daemon that is silent, and
    whose controller waits longer than these tests take."""
    settings = ["MessageTimeout=2", "SlurmdTimeout=300"]
    with private_cluster(accounting="none", nodes=4, cpus=2, settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, cluster: private_slurm.Cluster) -> Iterator[Job]:
    made = Job(tmp_path_factory.mktemp("job"), environment(cluster))
    (made.folder / "rank.py").write_text(RANK)
    script = made.folder / "job.sh"
    rank = f"{sys.executable} {made.folder}/rank.py {made.attempt.heartbeats}"
    script.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {rank}\n")
    log = made.folder / "slurm-%j.out"
    made.job_id = made.slurm("sbatch", "--parsable", "-N4", "-o", str(log), str(script))
    log = made.folder / f"slurm-{made.job_id}.out"
    wait_for(lambda: log.exists() and log.read_text().count("ready") == 4, "all ranks")
    yield made
    subprocess.run(["scancel", made.job_id], env=made.environment, check=False)


def test_every_node_of_a_job_is_read(job: Job, tmp_path: Path) -> None:
    said = job.collect(tmp_path)
    assert "4 of 4 processes read on 4 of 4 nodes" in said
    assert "hang collect: PASS" in said
    records = read_paths([tmp_path]).records
    stacks = [row for row in records if isinstance(row, Stack) and row.main]
    assert sorted((row.who.rank, row.sample) for row in stacks) == [
        (rank, sample) for rank in range(4) for sample in (1, 2)
    ]
    assert {row.main.frames[-1].function for row in stacks if row.main} == {"stands_here"}
    assert not [row for row in records if isinstance(row, NodeState) and row.down]
    assert (tmp_path / f"logs/slurm-{job.job_id}-output.out").read_text().count("ready") == 4


def test_nodes_that_are_dead_or_frozen_are_told_and_never_stop_the_others(
    job: Job,
    cluster: private_slurm.Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own, living, dead, frozen = nodes_of_job = job.nodes()
    folder = cluster.plan.folder
    inside = {"SLURM_JOB_ID": job.job_id, "SLURMD_NODENAME": own}
    for name, value in {**job.environment, **inside}.items():
        monkeypatch.setenv(name, value)
    whole, failed = AttemptPaths(tmp_path / "whole"), AttemptPaths(tmp_path / "failed")
    note_lost_nodes(whole, nodes_of_job)
    control.kill(folder, f"slurmd-{dead}")
    control.pause(folder, f"slurmd-{frozen}")
    try:
        of_the_job = job.start_collecting(tmp_path)
        stalled = Movement("still", "no rank moves")
        collect_evidence(job.launched(), Supervisor(), stalled, nodes_of_job)
        note_lost_nodes(failed, nodes_of_job)
        said, _ = of_the_job.communicate(timeout=PATIENCE)
    finally:
        control.resume(folder, f"slurmd-{frozen}")
        control.start(folder, f"slurmd-{dead}")

    assert of_the_job.returncode == 0
    assert "2 of 2 processes read on 2 of 4 nodes" in said
    nodes = json.loads((tmp_path / "collected-job.json").read_text())["nodes"]
    assert (nodes.pop(own), nodes.pop(living)) == ("read", "read")
    assert all(why.startswith("not read: srun: error:") for why in nodes.values()), nodes

    evidence = job.attempt.evidence
    nodes = json.loads((evidence / "collected-job.json").read_text())["nodes"]
    printed = capsys.readouterr().out
    assert nodes.pop(living) == "read"
    assert set(nodes) == {dead, frozen}
    for name, why in nodes.items():
        assert why.startswith("not read: srun: error:")
        assert f"not collected: node {name}: {why}" in printed
        assert not (evidence / f"collected-{name}.json").exists()
    for name in (own, living):
        targets = json.loads((evidence / f"collected-{name}.json").read_text())["targets"]
        assert targets
        assert all(row["sources"] for row in targets)

    assert not whole.evidence.joinpath("collected-job.json").exists()
    assert set(read_json(failed.evidence / "collected-job.json")["nodes"]) == {dead, frozen}
    records = read_paths([failed.evidence]).records
    assert [row.node for row in records if isinstance(row, NodeState) and row.down] == [dead]


def test_job_that_has_ended_is_told_from_slurm_and_its_log_and_no_node_is_blamed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**job.environment, "SLURM_JOB_ID": job.job_id}.items():
        monkeypatch.setenv(name, value)
    nodes = job.nodes()
    job.slurm("scancel", job.job_id)
    wait_for(lambda: job.state().startswith("CANCELLED"), "the end of the job")
    said = job.collect(tmp_path)
    assert f"job {job.job_id} is CANCELLED: no process is looked at" in said
    assert (tmp_path / f"logs/slurm-{job.job_id}-output.out").is_file()

    attempt = AttemptPaths(tmp_path / "failed")
    note_lost_nodes(attempt, nodes)
    assert attempt.evidence.joinpath("nodes-slurm.txt").exists()
    assert not attempt.evidence.joinpath("collected-job.json").exists()
