"""The file of partitions that is made from what a real Slurm 22.05 says."""

from pathlib import Path

import pytest
import yaml
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.partition_config import config, limits, main, parse_nodes
from snakemake_executor_plugin_submitit.partitions import choose, read
from snakemake_executor_plugin_submitit.request import request

# `high` as Slurm has it before the default partition; of the others what differs from it.
SCONTROL = """\
PartitionName=high
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=n[1-4]
   PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=16 TotalNodes=4 SelectTypeParameters=NONE
   JobDefaults=(null)
   DefMemPerCPU=100 MaxMemPerNode=UNLIMITED
   TRES=cpu=16,mem=62.50G,node=4,billing=16,gres/gpu=16

PartitionName=main
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=n[1-4]
   State=UP TotalCPUs=16 TotalNodes=4 SelectTypeParameters=NONE

PartitionName=gpu
   AllowGroups=ALL AllowAccounts=lab AllowQos=ALL
   MaxNodes=1 MaxTime=2-12:00:00 MinNodes=1 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=g[1-2]
   State=UP TotalCPUs=192 TotalNodes=2 SelectTypeParameters=NONE
   DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
   TRES=cpu=192,mem=1500G,node=2,billing=192,gres/gpu=12

PartitionName=short
   MaxNodes=UNLIMITED MaxTime=02:00:00 MinNodes=1 LLN=NO MaxCPUsPerNode=2
   Nodes=n[1-2]
   State=UP TotalCPUs=8 TotalNodes=2 SelectTypeParameters=NONE
   DefMemPerNode=UNLIMITED MaxMemPerNode=8000

PartitionName=old
   State=DOWN TotalCPUs=4 TotalNodes=1 SelectTypeParameters=NONE

PartitionName=drained
   State=DRAIN TotalCPUs=4 TotalNodes=1 SelectTypeParameters=NONE

PartitionName=empty
   Nodes=(null)
   State=UP TotalCPUs=0 TotalNodes=0 SelectTypeParameters=NONE

PartitionName=reserved
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=YES OverSubscribe=NO
   State=UP TotalCPUs=4 TotalNodes=1 SelectTypeParameters=NONE
"""
SINFO = """\
CLUSTER: moon
gpu|128|1024000|gpu:a100:2,gpu:h200:6|ib,avx512
gpu|64|512000|gpu:a100:4|ib,2024
main|4|16000|gpu:4|old,ssd
high|4|16000|gpu:4|old,ssd
short|4|16000|gpu:4|old,ssd
old|4|16000|gpu:4|old,ssd
drained|4|16000|gpu:4|old,ssd
reserved|4|16000|gpu:4|old,ssd
main|4|16000|gpu:4|(null)
high|4|16000|gpu:4|(null)
short|4|16000|gpu:4|(null)
main|4|16000|gpu:4|(null)
high|4|16000|gpu:4|(null)
main|4|16000|gpu:4|(null)
high|4|16000|gpu:4|(null)
"""


@pytest.fixture
def slurm(programs: Programs) -> Programs:
    programs.answer("scontrol", SCONTROL)
    programs.answer("sinfo", SINFO)
    return programs


@pytest.mark.usefixtures("slurm")
def test_the_file_has_the_limits_of_each_open_partition_the_default_one_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0

    said = capsys.readouterr()
    whole = {"max_mem_mb": 16000, "max_threads": 4, "max_nodes": 4, "max_gpu": 4}
    assert list(yaml.safe_load(said.out)["partitions"].items()) == [
        ("main", {**whole, "available_constraints": ["old", "ssd"]}),
        ("high", {**whole, "available_constraints": ["old", "ssd"]}),
        (
            "gpu",
            {
                "max_runtime": "2-12:00:00",
                "max_mem_mb": 1024000,
                "max_threads": 128,
                "max_nodes": 1,
                "max_gpu": 8,
                "available_gpu_models": ["a100", "h200"],
                "available_constraints": ["2024", "avx512", "ib"],
            },
        ),
        (
            "short",
            {
                "max_runtime": "02:00:00",
                "max_mem_mb": 8000,
                "max_threads": 2,
                "max_nodes": 2,
                "max_gpu": 4,
                "available_constraints": ["old", "ssd"],
            },
        ),
    ]
    assert said.err.splitlines() == [
        "gpu is not for everyone: AllowAccounts=lab",
        "old is left out: State=DOWN",
        "drained is left out: State=DRAIN",
        "empty is left out: sinfo shows no node of it",
        "reserved is left out: ReqResv=YES",
    ]


@pytest.mark.usefixtures("slurm")
def test_the_executor_reads_the_file_and_chooses_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([])
    path = tmp_path / "partitions.yaml"
    path.write_text(capsys.readouterr().out)

    partitions = read(path)

    asked = {
        "short": request({"runtime": 100, "mem_mb": 4000}, 2),
        "main": request({"runtime": 300, "mem_mb": 4000}, 2),
        "gpu": request({"runtime": 300, "gpu": 2, "gpu_model": "h200", "constraint": "ib"}, 16),
    }
    assert {name: choose(partitions, job)[0] for name, job in asked.items()} == {
        name: name for name in asked
    }


def test_partitions_of_another_cluster_name_it(
    slurm: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["moon"])

    found = yaml.safe_load(capsys.readouterr().out)["partitions"]
    assert {limits["cluster"] for limits in found.values()} == {"moon"}
    assert slurm.calls == [
        "scontrol --clusters moon show partition",
        "sinfo --clusters moon --noheader --Node --format %R|%c|%m|%G|%f",
    ]


@pytest.mark.parametrize(
    ("gres", "keys"),
    [
        ("(null)", {}),
        ("gpu:4", {"max_gpu": 4}),
        ("gpu:a100:4(S:0-1)", {"max_gpu": 4, "available_gpu_models": ["a100"]}),
        ("lustre:no_consume:4K,gpu:2(S:0)", {"max_gpu": 2}),
        (
            "gpu:1g.5gb:7(S:0),gpu:2g.10gb:2",
            {"max_gpu": 9, "available_gpu_models": ["1g.5gb", "2g.10gb"]},
        ),
        # Jobs that name a model may get one without: not known which it is.
        ("gpu:a100:2,gpu:2", {"max_gpu": 4}),
        ("shard:8,nogpu:3,gpu:4K,gpu", {}),
    ],
)
def test_gpus_of_all_forms_are_read(gres: str, keys: dict[str, object]) -> None:
    nodes = parse_nodes(f"p|0|0|{gres}|(null)")

    assert limits({}, nodes) == {"max_nodes": 1, **keys}


def test_words_that_are_none_of_slurms_give_no_partition() -> None:
    for text in ("", "No partitions in the system\n", "PartitionName=\n"):
        assert config(text, "a|b|c|d|e\n|||||\n") == ({}, [])


@pytest.mark.parametrize("answer", ["", "No partitions in the system\n"])
def test_without_partitions_it_ends_with_2_and_a_sentence(
    slurm: Programs, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    slurm.answer("scontrol", answer)

    assert main([]) == 2
    assert capsys.readouterr() == ("", "no partitions: Slurm has none that takes jobs\n")


def test_without_an_answer_it_ends_with_2_and_slurms_words(
    slurm: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.answer("sinfo", error="slurm_load_partitions: Unable to contact\nslurm controller\n")

    assert main([]) == 2
    assert capsys.readouterr() == (
        "",
        "no partitions: sinfo: slurm_load_partitions: Unable to contact slurm controller\n",
    )
