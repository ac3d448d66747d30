"""`shakedown hang collect --job` on a real cluster: every node, and what one that fails leaves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import private_slurm
import pytest

from shakedown.hang.parse import read_paths
from shakedown.hang.records import NodeState, Stack
from tests.slurm_fixtures import environment, private_cluster, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RANK = "import time\ndef stands_here():\n    print('ready', flush=True)\n    time.sleep(600)\n"


@dataclass
class Job:
    """Two sleeping ranks on two nodes, started by srun in a batch script."""

    folder: Path
    environment: dict[str, str]
    job_id: str = ""

    def slurm(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def collect(self, out: Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "shakedown.cli", "hang", "collect", "--job", self.job_id]
        return subprocess.run(
            [*command, "--out", str(out), "--gap", "0.1", "--rounds", "2"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def state(self) -> str:
        return self.slurm("scontrol", "show", "job", self.job_id).partition("JobState=")[2][:9]


@pytest.fixture(scope="module")
def cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """A cluster of its own, whose clients wait 2 s, not 10 s, for a daemon that is silent."""
    settings = ["MessageTimeout=2"]
    with private_cluster(accounting="none", nodes=2, cpus=2, settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, cluster: private_slurm.Cluster) -> Iterator[Job]:
    made = Job(tmp_path_factory.mktemp("job"), environment(cluster))
    (made.folder / "rank.py").write_text(f"{RANK}stands_here()\n")
    script = made.folder / "job.sh"
    script.write_text(
        f"#!/bin/sh\nsrun --ntasks-per-node=1 {sys.executable} {made.folder}/rank.py\n"
    )
    log = made.folder / "slurm-%j.out"
    made.job_id = made.slurm("sbatch", "--parsable", "-N2", "-o", str(log), str(script))
    log = made.folder / f"slurm-{made.job_id}.out"
    wait_for(lambda: log.exists() and log.read_text().count("ready") == 2, "both ranks")
    yield made
    subprocess.run(["scancel", made.job_id], env=made.environment, check=False)


def test_every_node_of_a_job_is_read(job: Job, tmp_path: Path) -> None:
    done = job.collect(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 processes read on 2 of 2 nodes" in done.stdout
    assert "hang collect: PASS" in done.stdout
    records = read_paths([tmp_path]).records
    stacks = [row for row in records if isinstance(row, Stack) and row.main]
    assert sorted((row.who.rank, row.sample) for row in stacks) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert {row.main.frames[-1].function for row in stacks if row.main} == {"stands_here"}
    assert not [row for row in records if isinstance(row, NodeState) and row.down]
    assert (tmp_path / f"logs/slurm-{job.job_id}-output.out").read_text().count("ready") == 2


def test_node_that_does_not_answer_never_stops_the_other(
    job: Job, cluster: private_slurm.Cluster, tmp_path: Path
) -> None:
    nodes = job.slurm("squeue", "-h", "-j", job.job_id, "-o", "%N")
    first, second = job.slurm("scontrol", "show", "hostnames", nodes).split()
    (daemon,) = (p.pid for p in cluster.processes if p.name == f"slurmd-{second}")
    os.kill(daemon, signal.SIGSTOP)
    try:
        done = job.collect(tmp_path)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "collected-job.json").read_text())
    assert body["nodes"][first] == "read"
    assert body["nodes"][second].startswith("not read: srun: error:")
    assert "1 of 1 processes read on 1 of 2 nodes" in done.stdout


def test_job_that_has_ended_is_told_from_slurm_and_its_log(job: Job, tmp_path: Path) -> None:
    job.slurm("scancel", job.job_id)
    wait_for(lambda: job.state().startswith("CANCELLED"), "the end of the job")
    done = job.collect(tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"job {job.job_id} is CANCELLED: no process is looked at" in done.stdout
    assert (tmp_path / f"logs/slurm-{job.job_id}-output.out").is_file()
