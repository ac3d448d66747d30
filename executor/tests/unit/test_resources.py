"""Snakemake's resources become Slurm's parameters, or a sentence that says why not."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_submitit.partitions import _KEYS
from snakemake_executor_plugin_submitit.request import (
    _ALIASES,
    _READERS,
    doubtful_names,
    request,
)
from snakemake_executor_plugin_submitit.resources import (
    Parameters,
    ResourceError,
    checkpoint_seconds,
    slurm_parameters,
)

FURTHER = Path(__file__).parents[2] / "docs" / "further.md"


def parameters(given: dict[str, Any], threads: int = 1, **defaults: Any) -> Parameters:
    return slurm_parameters(request(given, threads, defaults))


def options(given: dict[str, Any], **defaults: Any) -> Parameters:
    """Those that submitit has no parameter for."""
    found: Parameters = parameters(given, 1, **defaults).get("additional_parameters", {})
    return found


def test_every_resource_reaches_its_parameter() -> None:
    given = {
        "runtime": 90,
        "nodes": 2,
        "tasks": 16,
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
        "clusters": "north,south",
        "checkpoint_seconds": 180,
        "slurm_extra": "--licenses=x:1 --hold '--comment2=a b'",
    }

    assert parameters(given, threads=8) == {
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
        "extra": ["--licenses=x:1", "--hold", "--comment2=a b"],
        "additional_parameters": {
            "reservation": "night",
            "clusters": "north,south",
            "ntasks": 16,
            "signal": "B:USR2@180",
        },
    }


def test_empty_texts_and_no_gpu_mean_not_given() -> None:
    texts = ("slurm_partition", "slurm_account", "exclude", "exclude_file", "gres", "slurm_extra")
    zeros = ("gpu", "checkpoint_seconds", "runtime", "tasks", "tasks_per_node", "mem_mb_per_cpu")
    given = {**dict.fromkeys(texts, ""), **dict.fromkeys(zeros, 0), "exclusive": False, "mpi": ""}

    assert parameters({**given, "qos": None}) == {"cpus_per_task": 1}


def test_snakemakes_own_resources_and_the_workflows_counters_are_left_alone() -> None:
    own = {"_cores": 4, "_nodes": 1, "tmpdir": "scratch", "disk_mb": 1, "mem": "1 GB"}
    counters = {"io": 1, "load": 50, "vllm": 1, "gpu_manufacturer": "nvidia", "note": "a\nb"}

    assert parameters({**own, **counters}) == {"cpus_per_task": 1}
    assert doubtful_names({**own, **counters, "licenses": 3, "network": 2}) == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("partition", "slurm_partition"),
        ("account", "slurm_account"),
        ("gpus", "gpu"),
        ("walltime", "runtime"),
        ("time", "runtime"),
        ("mem_gb", "mem_mb"),
        ("ntasks", "tasks"),
        ("slurm_partitoin", "slurm_partition"),
        ("runtimes", "runtime"),
        ("task", "tasks"),
        ("node", "nodes"),
    ],
)
def test_a_name_that_seems_meant_for_slurm_passes_with_a_warning(name: str, meant: str) -> None:
    assert parameters({name: "x"}) == {"cpus_per_task": 1}
    assert list(doubtful_names([name, "gpu", "load"])) == [name]
    assert f"resource {name!r}" in doubtful_names([name])[name]
    assert f"did you mean {meant!r}?" in doubtful_names([name])[name]


# --- texts


@pytest.mark.parametrize("name", ["qos", "constraint", "reservation"])
def test_a_name_with_slurm_in_front_means_the_same(name: str) -> None:
    short = parameters({name: "x"})

    assert short != parameters({})
    assert parameters({f"slurm_{name}": "x"}) == short
    assert parameters({f"slurm_{name}": "x", name: "x"}) == short
    with pytest.raises(ResourceError, match=f"{name} and slurm_{name} differ"):
        parameters({name: "y", f"slurm_{name}": "x"})


@pytest.mark.parametrize("name", ["cluster", "clusters", "slurm_cluster"])
def test_a_cluster_may_be_named_in_three_ways(name: str) -> None:
    assert options({name: "north"}) == {"clusters": "north"}


def test_texts_that_yaml_reads_as_numbers_are_texts() -> None:
    found = parameters({"slurm_account": 4711, "qos": 1, "gpu_model": 4090, "gpu": "2"})

    assert found == {
        "cpus_per_task": 1,
        "account": "4711",
        "qos": "1",
        "gres": "gpu:4090:2",
    }


def test_of_several_accounts_all_are_offered_and_the_first_stands() -> None:
    asked = request({"slurm_account": "lab, other third"}, 1)

    assert asked.accounts == ("lab", "other", "third")
    assert slurm_parameters(asked)["account"] == "lab"
    assert request({}, 1).accounts == ()


def test_exclusive_may_say_for_whom() -> None:
    assert parameters({"exclusive": "user"})["exclusive"] == "user"
    assert parameters({"exclusive": "True"})["exclusive"] is True


@pytest.mark.parametrize("resource", ["exclude", "nodelist"])
def test_what_is_no_nodes_name_reaches_no_option(resource: str) -> None:
    with pytest.raises(ResourceError, match=f"resource {resource}: .* is not a node name"):
        parameters({resource: "n1;id"})


def test_a_file_of_nodes_does_not_part_jobs_that_are_otherwise_equal() -> None:
    assert parameters({"exclude_file": "bad_nodes.txt"}) == parameters({})


# --- CPUs, memory, GPUs


@pytest.mark.parametrize(
    ("given", "cpus"),
    [({}, 8), ({"cpus_per_task": 3}, 3), ({"cpus_per_task": 0}, 1), ({"cpus_per_task": -1}, None)],
)
def test_cpus_per_task_outrank_threads(given: dict[str, Any], cpus: int | None) -> None:
    assert parameters(given, threads=8).get("cpus_per_task") == cpus


@pytest.mark.parametrize(("cpus", "option"), [(4, {"cpus-per-gpu": 4}), (0, None), (-1, None)])
def test_cpus_per_gpu_replace_threads(cpus: int, option: Parameters | None) -> None:
    found = parameters({"gpu": 2, "cpus_per_gpu": cpus}, threads=8)

    assert found.get("additional_parameters") == option
    assert "cpus_per_task" not in found


def test_cpus_per_gpu_of_a_job_without_gpus_say_nothing() -> None:
    assert parameters({"cpus_per_gpu": 4}, threads=8) == {"cpus_per_task": 8}


def test_memory_per_cpu_outranks_memory_per_node() -> None:
    assert parameters({"mem_mb": 1000, "mem_mb_per_cpu": 500}) == {
        "cpus_per_task": 1,
        "mem_per_cpu": "500M",
    }
    assert parameters({"mem_mb": 0})["mem"] == "0M"


@pytest.mark.parametrize(
    ("given", "gres"),
    [
        ({"gpu": 2}, "gpu:2"),
        ({"gpu": 2, "gpu_model": "a100"}, "gpu:a100:2"),
        ({"gpu_model": "a100"}, "gpu:a100:1"),
        ({"gpu_model": "a100", "gpu": 0}, None),
        ({"gpu": 8, "nodes": 2}, "gpu:4"),
        ({"gres": "gpu:2,nvme:1"}, "gpu:2,nvme:1"),
        ({"gres": "nvme:1", "gpu": 2}, "nvme:1,gpu:2"),
        ({"gres": "nvme:1"}, "nvme:1"),
        ({"gres": "gpu:2", "gpu": 0, "gpu_model": "a100"}, "gpu:2"),
    ],
)
def test_gpus_are_those_of_each_node(given: dict[str, Any], gres: str | None) -> None:
    assert parameters(given).get("gres") == gres


def test_gpus_that_cannot_be_spread_evenly_are_spread_by_slurm() -> None:
    found = parameters({"gpu": 3, "nodes": 2, "gpu_model": "a100", "gres": "nvme:1"})

    assert found["additional_parameters"] == {"gpus": "a100:3"}
    assert found["gres"] == "nvme:1"


# --- tasks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Of the whole job, on as many nodes as needed.
        ({"tasks": 6}, {"ntasks": 6}),
        ({"tasks": 1}, {"ntasks": 1}),
        ({"tasks": 6, "nodes": 2}, {"ntasks": 6}),
        ({"tasks": 1, "nodes": 2}, {"ntasks": 2}),
        ({"tasks_per_node": 4, "nodes": 2}, {"ntasks-per-node": 4}),
        ({"tasks": 8, "tasks_per_node": 4}, {"ntasks": 8, "ntasks-per-node": 4}),
        # With GPUs.
        ({"gpu": 4, "tasks": 2}, {"ntasks-per-gpu": 2}),
        ({"gres": "gpu:4", "tasks": 2}, {"ntasks-per-gpu": 2}),
        ({"gpu": 4, "tasks": 4, "nodes": 2}, {"ntasks": 4}),
        ({"gpu": 4, "tasks": 9, "tasks_per_gpu": 2}, {"ntasks-per-gpu": 2}),
        ({"gpu": 4, "tasks": 9, "tasks_per_gpu": 2, "nodes": 2}, {"ntasks-per-gpu": 2}),
        ({"gpu": 4, "tasks": 2, "tasks_per_gpu": -1}, {}),
        ({"gpu": 4, "tasks_per_node": 2}, {"ntasks-per-node": 2}),
        ({"tasks_per_gpu": 2}, {}),
        ({"mpi": "srun", "slurm_extra": "-n 8"}, {}),
        # MPI.
        ({"mpi": "srun", "tasks": 6}, {"ntasks": 6}),
        ({"mpi": True, "tasks_per_node": 4}, {"ntasks-per-node": 4}),
        ({"mpi": "mpirun", "tasks_per_node": 4, "nodes": 2}, {"ntasks-per-node": 4}),
        ({"mpi": "srun", "gpu": 8, "tasks_per_node": 4}, {"gpus": "8", "ntasks-per-node": 4}),
        (
            {"mpi": "srun", "gpu": 2, "gpu_model": "x", "tasks": 2},
            {"gpus": "x:2", "ntasks-per-gpu": 2},
        ),
        ({"mpi": "srun", "gpu": 4, "tasks": 4, "nodes": 2}, {"ntasks": 4}),
        ({"mpi": "srun", "gres": "gpu:2", "tasks": 2}, {"ntasks-per-gpu": 2}),
    ],
)
def test_tasks_are_asked_for(given: dict[str, Any], expected: Parameters) -> None:
    assert options(given) == expected
    assert parameters(given).get("nodes") == given.get("nodes")


# --- requeue, warning


def test_requeue_may_be_forbidden() -> None:
    assert options({"requeue": False}) == {"no-requeue": True}
    assert options({"requeue": "false"}) == {"no-requeue": True}
    assert options({"slurm_extra": "--no-requeue"}) == {"no-requeue": True}
    assert options({"requeue": True}) == {}


def test_a_warning_takes_a_whole_number_of_seconds_below_the_time_limit() -> None:
    given = {"checkpoint_seconds": 59, "runtime": 1}

    assert checkpoint_seconds(request(given, 1)) == 59
    assert checkpoint_seconds(request({**given, "checkpoint_seconds": ""}, 1)) == 0
    assert checkpoint_seconds(request({}, 1)) == 0


# --- settings, and options in slurm_extra


def test_a_resource_outranks_a_setting() -> None:
    settings = {"qos": "low", "reservation": "night", "requeue": False}

    assert parameters({"slurm_qos": "high", "requeue": True}, 1, **settings) == {
        "cpus_per_task": 1,
        "qos": "high",
        "additional_parameters": {"reservation": "night"},
    }
    assert parameters({}, 1, **settings)["qos"] == "low"
    assert options({}, **settings) == {"reservation": "night", "no-requeue": True}


def test_a_job_that_saves_is_requeued_whatever_the_setting() -> None:
    assert options({"checkpoint_seconds": 60}, requeue=False) == {"signal": "B:USR2@60"}


def test_an_option_stands_beside_resources_and_sbatch_takes_the_last() -> None:
    found = parameters({"slurm_partition": "main", "slurm_extra": "-p other --signal=USR1@9"})

    assert found == {
        "cpus_per_task": 1,
        "partition": "main",
        "extra": ["-pother"],
        "additional_parameters": {"signal": "B:USR1@9"},
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"runtime": -1}, "runtime=-1: expected at least 0"),
        ({"runtime": "1h"}, "expected a whole number"),
        ({"nodes": 1.5}, "expected a whole number"),
        ({"nodes": True}, "expected a whole number"),
        ({"nodes": 0}, "expected at least 1"),
        ({"nodes": float("inf")}, "expected a whole number"),
        ({"mem_mb": float("nan")}, "expected a whole number"),
        ({"gpu": -1}, "at least 0"),
        ({"gpu": 2, "gres": "gpu:2"}, "keep one"),
        ({"gpu_model": "'tesla'"}, "expected a GPU model"),
        ({"gpu_model": "a100:2,b"}, "expected a GPU model"),
        ({"slurm_partition": True}, "expected a text"),
        ({"slurm_partition": "a\\"}, "no backslash"),
        ({"constraint": "a\n#SBATCH --x"}, "expected a text of one line"),
        ({"exclude": ["n1"]}, "expected node names"),
        ({"exclude_file": 3.5}, "expected a text"),
        ({"exclude_file": "a\0b"}, "expected a text of one line"),
        ({"exclusive": 2}, "expected true or false"),
        ({"requeue": "perhaps"}, "expected true or false"),
        ({"checkpoint_seconds": "soon"}, "expected a whole number"),
        ({"checkpoint_seconds": -1}, "at least 0"),
        ({"checkpoint_seconds": 70000}, "at most 65535"),
        ({"checkpoint_seconds": 60, "runtime": 1}, "expected less than runtime=1 minutes"),
        ({"checkpoint_seconds": 60, "requeue": False}, "requeue=false forbids"),
        ({"checkpoint_seconds": 60, "slurm_extra": "--signal=USR1@9"}, "keep one"),
        ({"tasks": -1}, "at least 0"),
        ({"mpi": "srun"}, "expected tasks or tasks_per_node"),
        ({"mpi": "srun", "tasks": 2, "tasks_per_node": 2}, "keep one"),
        ({"requeue": True, "slurm_extra": "--no-requeue"}, "keep one"),
        ({"checkpoint_seconds": 60, "slurm_extra": "--no-requeue"}, "requeue=false forbids"),
        ({"cluster": "a", "slurm_cluster": "b"}, "resources cluster and slurm_cluster differ"),
        ({"slurm_extra": "--output=x"}, "slurm_extra: --output: "),
        ({"slurm_extra": 3.5}, "expected a text of one line"),
        ({"exclude": "n1", "slurm_extra": "-x n2"}, "slurm_extra, which says 'n2', differ"),
        ({"slurm_extra": "-x n1;id"}, "resource exclude: 'n1;id' is not a node name"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ResourceError) as caught:
        parameters(given)

    assert words in str(caught.value)


# --- the documentation


def documented(header: str) -> set[str]:
    """What stands between backticks in the first column of the table with this header."""
    lines = FURTHER.read_text(encoding="utf-8").splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index(header) + 2 :])
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_every_resource_stands_in_the_table_of_resources() -> None:
    assert {*_READERS, *_ALIASES} - documented("| resource | Slurm |") == set()


def test_every_limit_stands_in_the_table_of_partitions() -> None:
    header = "| key | a job fits when | in its score |"

    assert set(_KEYS) - documented(header) == set()
