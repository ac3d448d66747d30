"""A job on its way: what is checked before it is submitted, and how its log is named."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_submitit.partitions import Partition
from snakemake_executor_plugin_submitit.resources import ResourceError
from snakemake_executor_plugin_submitit.work import label, log_folder, prepare


def job(resources: Mapping[str, Any], **wildcards: str) -> Any:
    records = ("_code", "_params", "_input", "_software_stack_hash")
    persistence = SimpleNamespace(**{name: lambda _job: "" for name in records})
    return SimpleNamespace(
        name="train",
        rule=SimpleNamespace(name="train", shellcmd="train"),
        dag=SimpleNamespace(workflow=SimpleNamespace(persistence=persistence)),
        format_wildcards=lambda command, **_others: command,
        resources=resources,
        threads=4,
        wildcards_dict=wildcards,
        input=[],
        output=["model"],
        is_group=lambda: False,
    )


def group(resources: Mapping[str, Any]) -> Any:
    """Snakemake's group jobs have no wildcards of their own."""
    return SimpleNamespace(name="pair", resources=resources, jobs=[job({})], is_group=lambda: True)


def test_a_job_is_checked_and_noted() -> None:
    given = {"mem_mb": 5, "exclude_file": "results/bad_nodes.txt", "vllm": 1}

    prepared = prepare(job(given), "make it")

    assert prepared.command == "make it"
    assert prepared.parameters == {"cpus_per_task": 4, "mem": "5M"}
    assert prepared.exclude_file == Path("results/bad_nodes.txt")
    assert not prepared.checkpoints
    assert prepared.accounts == ()
    assert prepared.warnings == ()


def test_the_settings_hold_where_the_job_says_nothing() -> None:
    prepared = prepare(job({"slurm_account": "lab,other"}), "make it", {"qos": "low"})

    assert prepared.parameters == {"cpus_per_task": 4, "account": "lab", "qos": "low"}
    assert prepared.accounts == ("lab", "other")


def test_a_name_that_says_nothing_is_warned_of() -> None:
    (words,) = prepare(job({"partition": "main"}), "make it").warnings

    assert "did you mean 'slurm_partition'?" in words


PARTITIONS = (Partition("short", {"max_runtime": 60}), Partition("long", {"max_runtime": 600}))


@pytest.mark.parametrize(
    ("given", "partition"),
    [
        ({"runtime": 30}, "short"),
        ({"runtime": 300}, "long"),
        ({"runtime": 300, "slurm_partition": "mine"}, "mine"),
    ],
)
def test_a_job_that_names_no_partition_gets_the_one_that_fits(
    given: Mapping[str, Any], partition: str
) -> None:
    prepared = prepare(job(given), "make it", partitions=PARTITIONS)

    assert prepared.parameters["partition"] == partition
    assert prepared.warnings == ()


def test_where_no_partition_fits_the_clusters_default_holds() -> None:
    prepared = prepare(job({"runtime": 3000}), "make it", partitions=PARTITIONS)

    assert "partition" not in prepared.parameters
    (words,) = prepared.warnings
    assert words.startswith("train: no partition fits (short: runtime 3000 is above its 60; ")


@pytest.mark.parametrize(("seconds", "checkpoints"), [(60, True), (0, False), ("", False)])
def test_a_job_that_wants_a_warning_has_checkpoints(seconds: object, checkpoints: bool) -> None:
    prepared = prepare(job({"checkpoint_seconds": seconds}), "make it")

    assert prepared.checkpoints is checkpoints


def test_an_empty_name_is_no_file() -> None:
    assert prepare(job({"exclude_file": ""}), "make it").exclude_file is None


def test_a_groups_cpus_are_those_that_its_jobs_need_at_once() -> None:
    prepared = prepare(group({"_cores": 6}), "make it")

    assert prepared.parameters["cpus_per_task"] == 6


def test_an_impossible_resource_is_refused_before_anything_is_submitted() -> None:
    with pytest.raises(ResourceError, match="runtime"):
        prepare(job({"runtime": -1}), "make it")


def test_a_job_is_shown_by_its_rule_and_wildcards() -> None:
    assert label(job({}, seed="1", model="a b")) == "train seed=1 model=a b"
    assert label(group({})) == "pair"


def test_a_log_stands_below_its_rule_and_wildcards() -> None:
    assert log_folder(job({})) == Path("rule_train")
    assert log_folder(job({}, seed="1", model="a/../b")) == Path("rule_train/1_a_.._b")
    assert log_folder(job({}, seed="..")) == Path("rule_train/_.")
    assert log_folder(group({})) == Path("group_pair")
    long = log_folder(job({}, seed="ü" * 300)).name
    assert len(long.encode()) <= 255
    assert long != log_folder(job({}, seed="ü" * 301)).name
