"""A watch over a job that was submitted by hand, on two nodes of a real cluster."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.slurm_fixtures import wait_for
from tests.watches import Watch
from tests.workflow.helpers import processes_that_mention

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# SIGUSR1 ends the loop.
RANK = """
import signal, sys, time
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
def step():
    time.sleep(0.1)
    print("step", flush=True)
while not told:
    step()
"""


@dataclass
class Lab:
    """Jobs of a user who has never heard of shakedown, and watches over them."""

    folder: Path
    environment: dict[str, str]
    jobs: list[str] = field(default_factory=list)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def submit(self) -> str:
        """Two ranks on two nodes, that step."""
        rank = self.folder / "rank.py"
        rank.write_text(RANK)
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/sh\nsrun --ntasks-per-node=1 {sys.executable} {rank}\n")
        log = self.folder / "slurm-%j.out"
        self.jobs.append(self.run("sbatch", "--parsable", "-N2", "-o", str(log), str(script)))
        out = self.folder / f"slurm-{self.jobs[-1]}.out"
        wait_for(lambda: out.exists() and out.read_text().count("step") > 2, "the first steps")
        return self.jobs[-1]

    def pids(self) -> list[int]:
        """Of the ranks of the newest job, in their order."""
        found = {}
        for line in processes_that_mention(f"{self.folder}/rank.py"):
            pid = int(line.partition(" ")[0])
            with contextlib.suppress(OSError):  # it has ended meanwhile
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
                # srun and the batch script have none of a step.
                if {f"SLURM_JOB_ID={self.jobs[-1]}", "SLURM_STEP_ID=0"} <= set(environment):
                    found[next(e for e in environment if e.startswith("SLURM_PROCID="))] = pid
        return [found[name] for name in sorted(found)]

    def watch(self, *options: str) -> Watch:
        own = ["--job", self.jobs[-1], "--interval", "2", "--out", str(self.folder / "watch")]
        return Watch(*own, *options, env=self.environment)


@pytest.fixture
def lab(tmp_path: Path, slurm_env: dict[str, str]) -> Iterator[Lab]:
    made = Lab(tmp_path, slurm_env)
    yield made
    for job_id in made.jobs:
        subprocess.run(["scancel", job_id], env=slurm_env, check=False)


def test_a_stopped_rank_is_named_and_the_jobs_end_is_the_watchs(lab: Lab) -> None:
    lab.submit()
    with lab.watch() as watch:
        assert re.search(r"2 ranks \(0 on n\d, 1 on n\d\)", watch.until("ranks")[-1])
        ranks = lab.pids()
        os.kill(ranks[1], signal.SIGSTOP)
        assert "ALARM hung: rank 1 is stopped" in watch.until("ALARM")[-1]
        assert lab.run("squeue", "-h", "-o", "%T", "-j", lab.jobs[-1]) == "RUNNING"
        os.kill(ranks[1], signal.SIGCONT)
        watch.until("moves again")
        for pid in ranks:
            os.kill(pid, signal.SIGUSR1)
        assert "COMPLETED (exit code 0:0)" in watch.until("ended: ")[-1]
        assert watch.code() == 0
    assert not processes_that_mention(f"attach.sampler --job {lab.jobs[-1]}")


def test_a_stall_is_cancelled_where_that_was_asked_for(lab: Lab) -> None:
    lab.submit()
    with lab.watch("--then", "scancel") as watch:
        watch.until("2 ranks")
        os.kill(lab.pids()[0], signal.SIGSTOP)
        assert "ALARM hung: rank 0 is stopped" in watch.until("ALARM")[-1]
        assert f"job {lab.jobs[-1]} is cancelled" in watch.until("scancel")[-1]
        lines = watch.until("ended: CANCELLED")
        assert lines[-1].endswith("after the alarm")
        assert not [line for line in lines if "ALARM ended" in line]
        assert watch.code() == 1


@pytest.mark.exhaustive
def test_a_killed_rank_and_a_job_that_is_over_are_told(lab: Lab) -> None:
    job_id = lab.submit()
    with lab.watch() as watch:
        watch.until("2 ranks")
        first, second = lab.pids()
        os.kill(second, signal.SIGKILL)
        assert "trainer-rank1 on n" in watch.until("is gone, and the others are there")[-1]
        assert "rank 1 ended" in watch.until("ALARM hung")[-1]
        os.kill(first, signal.SIGUSR1)
        assert "FAILED" in watch.until("ALARM ended")[-1]
        assert watch.code() == 1
    with lab.watch("--once") as watch:
        assert f"WATCH CRITICAL - job {job_id}: ended: FAILED" in watch.until("WATCH")[-1]
        assert watch.code() == 2


@pytest.mark.exhaustive
def test_all_components_of_a_heterogeneous_job_are_watched(lab: Lab) -> None:
    rank = lab.folder / "rank.py"
    rank.write_text(RANK)
    script = lab.folder / "het.sh"
    parts = "#SBATCH -N1 -n1\n#SBATCH hetjob\n#SBATCH -N1 -n1\n"
    script.write_text(f"#!/bin/sh\n{parts}srun --het-group=0,1 {sys.executable} {rank}\n")
    log = lab.folder / "het.out"
    lab.jobs.append(lab.run("sbatch", "--parsable", "-o", str(log), str(script)))
    wait_for(lambda: log.exists() and log.read_text().count("step") > 2, "the first steps")
    with lab.watch() as watch:
        watch.until("2 ranks")
        os.kill(lab.pids()[1], signal.SIGSTOP)
        assert "ALARM hung: rank 1 is stopped" in watch.until("ALARM")[-1]
