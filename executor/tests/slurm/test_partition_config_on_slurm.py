"""The file of partitions that a real Slurm's words make, as the executor reads it."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import private_slurm
import pytest

from snakemake_executor_plugin_submitit.partitions import Partition, read

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PARTITIONS = {
    "short": "Nodes=n[1-2] MaxTime=2:00:00 MaxMemPerNode=8000 MaxCPUsPerNode=2 MaxNodes=1",
    "closed": "Nodes=n1 State=DOWN",
}


@pytest.fixture
def scontrol(slurm_env: dict[str, str]) -> Iterator[None]:
    """The cluster has the partitions above, and a node has features."""

    def run(*arguments: str) -> None:
        subprocess.run(["scontrol", *arguments], env=slurm_env, check=True)

    try:
        for name, facts in PARTITIONS.items():
            run("create", f"PartitionName={name}", *facts.split())
        run("update", "NodeName=n1", "Features=ssd,avx512")
        yield
    finally:
        run("update", "NodeName=n1", "ActiveFeatures=", "AvailableFeatures=")
        for name in PARTITIONS:
            run("delete", f"PartitionName={name}")


@pytest.mark.usefixtures("scontrol")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_executor_reads_the_partitions_that_slurm_has(
    slurm_cluster: private_slurm.Cluster, slurm_env: dict[str, str], tmp_path: Path, elsewhere: bool
) -> None:
    cluster = [slurm_cluster.plan.name] if elsewhere else []
    command = [sys.executable, "-m", "snakemake_executor_plugin_submitit.partition_config"]

    done = subprocess.run(
        [*command, *cluster], env=slurm_env, capture_output=True, text=True, check=True
    )

    (tmp_path / "partitions.yaml").write_text(done.stdout)
    common = Partition("main", constraints=("avx512", "ssd"), cluster="".join(cluster))
    whole = {"max_mem_mb": 16000, "max_threads": 4, "max_nodes": 4, "max_gpu": 4}
    part = {"max_runtime": 120, "max_mem_mb": 8000, "max_threads": 2, "max_nodes": 1, "max_gpu": 4}
    assert read(tmp_path / "partitions.yaml") == (
        replace(common, limits=whole),
        replace(common, name="high", limits=whole),
        replace(common, name="short", limits=part),
    )
    assert done.stderr == "closed is left out: State=DOWN\n"
