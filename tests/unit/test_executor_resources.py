"""Snakemake's resources become Slurm's parameters, or a sentence that says why not."""

from typing import Any

import pytest

from snakemake_executor_plugin_submitit.resources import (
    VALID,
    ResourceError,
    slurm_parameters,
)


def test_every_resource_reaches_its_parameter() -> None:
    given = {
        "runtime": 90,
        "nodes": 2,
        "mem_mb": 4000,
        "gpu": 8,
        "gpu_model": "h200",
        "slurm_partition": "train",
        "slurm_account": "lab",
        "qos": "high",
        "constraint": "ib",
        "exclude": "n7",
        "nodelist": "n1,n2",
        "exclusive": True,
        "reservation": "night",
        "slurm_extra": "--licenses=x:1 --hold '--comment2=a b'",
    }

    assert slurm_parameters(given, threads=8) == {
        "time": 90,
        "nodes": 2,
        "cpus_per_task": 8,
        "mem": "4000M",
        "gres": "gpu:h200:4",
        "partition": "train",
        "account": "lab",
        "qos": "high",
        "constraint": "ib",
        "exclude": "n7",
        "nodelist": "n1,n2",
        "exclusive": True,
        "additional_parameters": {
            "licenses": "x:1",
            "hold": True,
            "comment2": "a b",
            "reservation": "night",
        },
    }


def test_empty_texts_and_no_gpu_mean_not_given() -> None:
    given = {"slurm_partition": "", "exclude": "", "gpu": 0, "gres": "", "slurm_extra": ""}

    assert slurm_parameters(given, threads=1) == {"cpus_per_task": 1}


def test_snakemakes_own_and_the_users_free_resources_are_left_alone() -> None:
    given = {"_cores": 4, "_nodes": 1, "tmpdir": "scratch", "disk_mb": 1, "mem": "1 GB", "vllm": 1}

    assert slurm_parameters(given, threads=1) == {"cpus_per_task": 1}


def test_cpus_per_task_outranks_threads() -> None:
    assert slurm_parameters({"cpus_per_task": 3}, threads=8) == {"cpus_per_task": 3}


def test_memory_per_cpu_outranks_memory_per_node() -> None:
    given = {"mem_mb": 1000, "mem_mb_per_cpu": 500}

    assert slurm_parameters(given, threads=1)["mem_per_cpu"] == "500M"
    assert "mem" not in slurm_parameters(given, threads=1)


def test_gres_is_passed_as_given() -> None:
    assert slurm_parameters({"gres": "gpu:2,nvme:1"}, threads=1)["gres"] == "gpu:2,nvme:1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runtime": 0}, "runtime=0: expected at least 1"),
        ({"runtime": "1h"}, "expected a whole number"),
        ({"nodes": 1.5}, "expected a whole number"),
        ({"nodes": True}, "expected a whole number"),
        ({"gpu": -1}, "at least 0"),
        ({"gpu": 3, "nodes": 2}, "cannot be spread evenly over nodes=2"),
        ({"gpu": 2, "gres": "gpu:2"}, "keep one"),
        ({"slurm_partition": 3}, "expected a text"),
        ({"constraint": "a\n#SBATCH --x"}, "expected a text of one line"),
        ({"slurm_extra": "licenses=x"}, "is not --name"),
        ({"slurm_extra": "-p main"}, "is not --name"),
        ({"slurm_extra": "--output=/dev/null"}, "--output is set by the executor"),
        ({"slurm_extra": "--a='"}, "No closing quotation"),
        ({"slurm_partitoin": "x"}, "did you mean 'slurm_partition'"),
        ({"slurm_moon": "x"}, "unknown resource 'slurm_moon'"),
        ({"runtimes": 3}, "did you mean 'runtime'"),
        ({"partition": "x"}, "give slurm_partition"),
        ({"gpus": 1}, "give gpu"),
        ({"tasks": 2}, "start the ranks by srun"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ResourceError) as caught:
        slurm_parameters(given, threads=1)

    assert words in str(caught.value)


@pytest.mark.parametrize("name", VALID)
def test_no_valid_name_is_taken_for_a_slip(name: str) -> None:
    numbers = {"runtime", "nodes", "cpus_per_task", "mem_mb", "mem_mb_per_cpu", "gpu"}
    value: Any = 2 if name in numbers else "--hold" if name == "slurm_extra" else "x"
    others = {"gpu": 2} if name == "gpu_model" else {}  # a model alone asks for nothing

    parameters = slurm_parameters({**others, name: value}, threads=1)

    assert parameters != slurm_parameters(others, threads=1)
