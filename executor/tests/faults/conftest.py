"""A private Slurm cluster for the faults of this folder; each test leaves it whole."""

from collections.abc import Callable, Iterator
from pathlib import Path

import private_slurm
import pytest
from private_slurm import control

from tests.slurm_fixtures import (
    Workflow,
    environment,
    private_cluster,
    slurm_programs,
    wait_for,
    workflows,
)

__all__ = ["shared_cluster", "slurm_cluster", "slurm_programs", "workflow"]


@pytest.fixture(scope="session")
def shared_cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """Four nodes of two CPUs, with accounting."""
    with private_cluster(accounting="db", nodes=4, cpus=2) as cluster:
        yield cluster


@pytest.fixture
def slurm_cluster(shared_cluster: private_slurm.Cluster) -> Iterator[private_slurm.Cluster]:
    """The shared cluster; daemons that a test has ended are started again."""
    yield shared_cluster
    folder = shared_cluster.plan.folder
    for name in private_slurm.status(folder).dead:
        control.start(folder, name)
    wait_for(lambda: all("idle" in row for row in private_slurm.status(folder).nodes), "idle nodes")


@pytest.fixture
def workflow(
    tmp_path: Path, slurm_cluster: private_slurm.Cluster
) -> Iterator[Callable[[str], Workflow]]:
    """Makes a workflow on the shared cluster; no job and no process of it may be left."""
    with workflows(tmp_path, environment(slurm_cluster)) as make:
        yield make
