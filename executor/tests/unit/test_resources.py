"""Snakemake's resources become Slurm's parameters, or a sentence that says why not."""

from typing import Any

import pytest

from snakemake_executor_plugin_submitit.resources import (
    VALID,
    ResourceError,
    checkpoint_seconds,
    node_names,
    slurm_parameters,
)


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
        "checkpoint_seconds": 180,
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
            "ntasks": 16,
            "signal": "B:USR2@180",
        },
    }


def test_empty_texts_and_no_gpu_mean_not_given() -> None:
    texts = ("slurm_partition", "exclude", "exclude_file", "gres", "slurm_extra")
    given = {**dict.fromkeys(texts, ""), "gpu": 0, "checkpoint_seconds": 0, "exclusive": False}

    assert slurm_parameters(given, threads=1) == {"cpus_per_task": 1}


def test_snakemakes_own_resources_and_declared_counters_are_left_alone() -> None:
    given = {"_cores": 4, "_nodes": 1, "tmpdir": "scratch", "disk_mb": 1, "mem": "1 GB", "vllm": 1}

    assert slurm_parameters(given, threads=1, declared={"vllm"}) == {"cpus_per_task": 1}


def test_a_counter_without_a_limit_is_refused_with_the_way_to_declare_it() -> None:
    with pytest.raises(ResourceError, match="--resources vllm=N"):
        slurm_parameters({"vllm": 1}, threads=1)


@pytest.mark.parametrize("name", ["qos", "constraint", "reservation"])
def test_a_name_with_slurm_in_front_means_the_same(name: str) -> None:
    short = slurm_parameters({name: "x"}, threads=1)

    assert slurm_parameters({f"slurm_{name}": "x"}, threads=1) == short
    assert slurm_parameters({f"slurm_{name}": "x", name: "x"}, threads=1) == short
    with pytest.raises(ResourceError, match=f"{name} and slurm_{name} differ"):
        slurm_parameters({f"slurm_{name}": "x", name: "y"}, threads=1)


def test_gpus_ask_for_nothing_else() -> None:
    assert slurm_parameters({"gpu": 2}, threads=1) == {"cpus_per_task": 1, "gres": "gpu:2"}


def test_exclusive_may_say_for_whom() -> None:
    assert slurm_parameters({"exclusive": "user"}, threads=1)["exclusive"] == "user"


def test_node_names_are_kept_in_order_each_once() -> None:
    names = node_names(" n[1-3,7], gpu-01.rack_2,n[1-3,7],a[1-2]b[3],", "resource exclude")

    assert names == ["n[1-3,7]", "gpu-01.rack_2", "a[1-2]b[3]"]


@pytest.mark.parametrize("resource", ["exclude", "nodelist"])
@pytest.mark.parametrize(
    "text",
    ["None assigned", "(null)", "--wrap=x", "-n1", "n1;id", "n1 n2", "n[1-2", "n1]", "n[a]", "n$X"],
)
def test_what_is_no_nodes_name_reaches_no_option(resource: str, text: str) -> None:
    with pytest.raises(ResourceError, match=f"resource {resource}: .* is not a node's name"):
        slurm_parameters({resource: text}, threads=1)


@pytest.mark.timeout(60)  # a quadratic search takes hours
@pytest.mark.parametrize("text", ["[" * 10**6, "n" * 10**6 + "!", "n[1," * 10**6])
def test_a_huge_list_of_nodes_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(ResourceError, match="is not a node's name") as caught:
        node_names("," * 10**6 + text, "resource exclude")

    assert len(str(caught.value)) < 200


def test_a_warning_takes_a_whole_number_of_seconds_below_the_time_limit() -> None:
    assert checkpoint_seconds({"checkpoint_seconds": 59, "runtime": 1}) == 59
    assert checkpoint_seconds({"checkpoint_seconds": "", "runtime": 1}) == 0
    assert checkpoint_seconds({}) == 0


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
        ({"nodes": float("inf")}, "expected a whole number"),
        ({"mem_mb": float("nan")}, "expected a whole number"),
        ({"gpu": -1}, "at least 0"),
        ({"gpu": 3, "nodes": 2}, "cannot be spread evenly over nodes=2"),
        ({"gpu": 2, "gres": "gpu:2"}, "keep one"),
        ({"slurm_partition": 3}, "expected a text"),
        ({"constraint": "a\n#SBATCH --x"}, "expected a text of one line"),
        ({"slurm_extra": "licenses=x"}, "is not --name"),
        ({"slurm_extra": "-p main"}, "is not --name"),
        ({"slurm_extra": "--output=/dev/null"}, "--output is set by the executor"),
        ({"slurm_extra": "--outp=/dev/null"}, "--output is set by the executor"),
        ({"slurm_extra": "--hold --no-requeue"}, "--no-requeue is set by the executor"),
        ({"slurm_extra": "--signal=B:9@1"}, "use the resource checkpoint_seconds"),
        ({"slurm_extra": "--ntasks=3"}, "use the resource tasks"),
        ({"slurm_extra": "--mem=1G"}, "use the resource mem_mb"),
        ({"slurm_extra": "--partit=x"}, "use the resource slurm_partition"),
        ({"slurm_extra": "--gpus=2"}, "use the resource gpu"),
        ({"slurm_extra": "--quiet"}, "--quiet is set by the executor"),
        ({"slurm_extra": "--clusters=other"}, "--clusters is set by the executor"),
        ({"exclude": ["n1"]}, "expected node names"),
        ({"exclude_file": 3}, "expected a text"),
        ({"exclude_file": "a\0b"}, "expected a text of one line"),
        ({"checkpoint_seconds": "soon"}, "expected a whole number"),
        ({"checkpoint_seconds": -1}, "at least 0"),
        ({"checkpoint_seconds": 70000}, "at most 65535"),
        ({"checkpoint_seconds": 60, "runtime": 1}, "expected less than runtime=1 minutes"),
        ({"tasks": 0}, "at least 1"),
        ({"tasks": 2, "nodes": 3}, "fewer than nodes=3"),
        ({"slurm_extra": "--a='"}, "No closing quotation"),
        ({"slurm_partitoin": "x"}, "did you mean 'slurm_partition'"),
        ({"slurm_moon": "x"}, "unknown resource 'slurm_moon'"),
        ({"runtimes": 3}, "did you mean 'runtime'"),
        ({"partition": "x"}, "give slurm_partition"),
        ({"gpus": 1}, "give gpu"),
        ({"mpi": "srun"}, "start the ranks by srun"),
        ({"ntasks": 2}, "give tasks"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ResourceError) as caught:
        slurm_parameters(given, threads=1)

    assert words in str(caught.value)


NUMBERS = ("runtime", "nodes", "tasks", "cpus_per_task", "mem_mb", "mem_mb_per_cpu", "gpu")


# The file is read when the job is submitted.
@pytest.mark.parametrize("name", [name for name in VALID if name != "exclude_file"])
def test_no_valid_name_is_taken_for_a_slip(name: str) -> None:
    numbers = {*NUMBERS, "checkpoint_seconds"}
    value: Any = 2 if name in numbers else "--hold" if name == "slurm_extra" else "x"
    others = {"gpu": 2} if name == "gpu_model" else {}  # a model alone asks for nothing

    parameters = slurm_parameters({**others, name: value}, threads=1)

    assert parameters != slurm_parameters(others, threads=1)


def test_a_file_of_nodes_does_not_part_jobs_that_are_otherwise_equal() -> None:
    with_file = slurm_parameters({"exclude_file": "bad_nodes.txt"}, threads=1)

    assert with_file == slurm_parameters({}, threads=1)
