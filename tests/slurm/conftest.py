"""One private Slurm cluster for all tests of this folder."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import private_slurm
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """Slurm's programs, installed where they are missing; without them the tests fail."""
    script = REPOSITORY / "scripts" / "install_system.sh"
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def slurm_cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """Four nodes with four fake GPUs each and accounting, alive for the whole session."""
    # Not pytest's own folder: Unix sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = private_slurm.start(folder, accounting="db", nodes=4, cpus=4)
    try:
        yield cluster
    finally:
        private_slurm.stop(folder)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def slurm_env(slurm_cluster: private_slurm.Cluster) -> dict[str, str]:
    """The environment of a program that uses the cluster; this Python's programs come first."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{outer.get('PATH', os.defpath)}"
    return {**outer, "PATH": programs, "OMP_NUM_THREADS": "1", **slurm_cluster.environment}
