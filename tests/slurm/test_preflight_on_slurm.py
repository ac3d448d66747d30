"""`shakedown preflight` over a real job of Slurm, and as Prolog, TaskProlog, HealthCheckProgram."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import private_slurm
import pytest

from shakedown.slurm.hostlist import expand_nodelist
from tests.slurm_fixtures import environment, private_cluster, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SOURCE = Path(__file__).resolve().parents[2] / "src"
# What an administrator writes, with a switch for the fault.
PROLOG = """#!/bin/bash
fault=$([ -e {folder}/broken ] && echo --fake-fault=low_shm)
PYTHONPATH={source} exec {python} -P -m shakedown.cli preflight --once prolog $fault
"""
HEALTH = """#!/bin/bash
PYTHONPATH={source} {python} -P -m shakedown.cli preflight --once health >> {folder}/health.log
echo "code $?" >> {folder}/health.log
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[private_slurm.Cluster]:
    for name, text in (("prolog", PROLOG), ("health", HEALTH)):
        script = tmp_path / f"{name}.sh"
        script.write_text(text.format(folder=tmp_path, source=SOURCE, python=sys.executable))
        script.chmod(0o755)
    settings = [f"Prolog={tmp_path}/prolog.sh", "PrologFlags=Alloc"]
    settings += [f"HealthCheckProgram={tmp_path}/health.sh", "HealthCheckInterval=5"]
    with private_cluster(nodes=1, accounting="none", settings=settings) as running:
        yield running


def shown(cluster: private_slurm.Cluster, *command: str) -> str:
    ended = subprocess.run(
        command, env=environment(cluster), capture_output=True, text=True, check=True
    )
    return ended.stdout


def test_a_good_node_runs_its_job_and_a_bad_one_is_drained(
    cluster: private_slurm.Cluster, tmp_path: Path
) -> None:
    first = shown(cluster, "srun", "--time=5", "echo", "ran")
    (tmp_path / "broken").touch()
    shown(cluster, "sbatch", "--time=5", "--output=/dev/null", "--wrap=true")

    wait_for(lambda: "drain" in shown(cluster, "sinfo", "--noheader", "--format=%T"), "a drain")

    assert first == "ran\n"
    assert "Prolog error" in shown(cluster, "sinfo", "--noheader", "--list-reasons")
    assert "PREFLIGHT OK" in (tmp_path / "health.log").read_text()
    assert "code 0" in (tmp_path / "health.log").read_text()


def test_a_bad_node_keeps_its_tasks_from_starting_and_is_not_drained(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "task_prolog.sh"
    command = f"PYTHONPATH={SOURCE} exec {sys.executable} -P -m shakedown.cli preflight --once task"
    fault = "$([ $SLURMD_NODENAME = $BAD ] && echo --fake-fault=low_shm)"
    script.write_text(f"#!/bin/sh\n{command} {fault}\n")
    script.chmod(0o755)
    srun = ["srun", "--nodelist=n1,n2", "--ntasks-per-node=1", f"--task-prolog={script}"]
    srun += ["echo", "ran"]
    runs = {
        bad: subprocess.run(
            srun, env={**slurm_env, "BAD": bad}, capture_output=True, text=True, check=False
        )
        for bad in ("none", "n2")
    }
    good, bad = runs["none"], runs["n2"]
    assert (good.returncode, good.stdout.count("ran")) == (0, 2)
    assert good.stdout.count("PREFLIGHT OK") == 2
    assert (bad.returncode, bad.stdout.count("ran")) == (1, 1)
    assert "PREFLIGHT CRITICAL - n2" in bad.stdout
    sinfo = ["sinfo", "--noheader", "--format=%T"]
    states = subprocess.run(sinfo, env=slurm_env, capture_output=True, text=True, check=True)
    assert "drain" not in states.stdout


def test_nodes_of_a_job_that_runs_are_checked_from_outside(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    submit = ["sbatch", "--parsable", "-N2", "--output=/dev/null", "--wrap", "sleep 600"]
    job_id = subprocess.run(
        submit, env=slurm_env, capture_output=True, text=True, check=True
    ).stdout.strip()
    own = [sys.executable, "-m", "shakedown.cli", "preflight", "--job", job_id]
    own += ["--out", str(tmp_path)]

    def preflight(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*own, *options], env=slurm_env, capture_output=True, text=True, check=False
        )

    def state() -> str:
        squeue = ["squeue", "--noheader", "--format=%T|%N", f"--jobs={job_id}"]
        return subprocess.run(
            squeue, env=slurm_env, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        wait_for(lambda: state().startswith("RUNNING"), "the job")
        first, second = expand_nodelist(state().partition("|")[2])
        other = preflight("--nodes", f"{first},elsewhere")
        assert other.returncode == 2
        assert "elsewhere is not in this allocation" in other.stderr
        checked = preflight("--nodes", second, "--fake-fault", f"low_shm:{second}")
        assert checked.returncode == 1, checked.stderr
        assert (tmp_path / "bad_nodes.txt").read_text() == f"{second}\n"
        assert not (tmp_path / "nodes" / f"{first}.json").exists()
        assert state().startswith("RUNNING")
    finally:
        subprocess.run(["scancel", job_id], env=slurm_env, check=True)
    wait_for(lambda: not state().startswith(("RUNNING", "COMPLETING")), "its end")
    over = preflight()
    assert over.returncode == 3
    assert "is CANCELLED and has no nodes to check" in over.stderr
