"""One private Slurm cluster for all tests of this folder."""

from collections.abc import Iterator

import private_slurm
import pytest

from tests.slurm_fixtures import environment, install_slurm, private_cluster


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    install_slurm()


@pytest.fixture(scope="session")
def slurm_cluster(slurm_programs: None) -> Iterator[private_slurm.Cluster]:
    """Four nodes with four fake GPUs each and accounting, alive for the whole session."""
    with private_cluster(accounting="db", nodes=4, cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm_env(slurm_cluster: private_slurm.Cluster) -> dict[str, str]:
    """The environment of a program that uses the cluster; this Python's programs come first."""
    return environment(slurm_cluster)
