"""`shakedown preflight --once` as a real Slurm's Prolog and HealthCheckProgram."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import private_slurm
import pytest

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
