"""A job on its way: what is checked before it is submitted, and how its log is named."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snakemake_executor_plugin_submitit.journal import Entry
from snakemake_executor_plugin_submitit.resources import ResourceError
from snakemake_executor_plugin_submitit.work import label, prepare

ENTRY = Entry("key", "print", "7_3", "token", "tag", "run", 1000.0)


def job(resources: Mapping[str, Any], **wildcards: str) -> Any:
    return SimpleNamespace(
        name="train",
        rule=SimpleNamespace(name="train"),
        resources=resources,
        threads=4,
        wildcards_dict=wildcards,
        input=[],
        output=["model"],
        shellcmd="train",
        is_group=lambda: False,
    )


def group(resources: Mapping[str, Any]) -> Any:
    """Snakemake's group jobs have no wildcards of their own."""
    return SimpleNamespace(name="pair", resources=resources, jobs=[job({})], is_group=lambda: True)


def test_a_job_is_checked_and_noted() -> None:
    given = {"mem_mb": 5, "exclude_file": "results/bad_nodes.txt", "vllm": 1}

    prepared = prepare(job(given), "make it", declared={"vllm"})

    assert prepared.command == "make it"
    assert prepared.parameters == {"cpus_per_task": 4, "mem": "5M"}
    assert prepared.exclude_file == Path("results/bad_nodes.txt")
    assert not prepared.checkpoints


@pytest.mark.parametrize(("seconds", "checkpoints"), [(60, True), (0, False), ("", False)])
def test_a_job_that_wants_a_warning_has_checkpoints(seconds: object, checkpoints: bool) -> None:
    prepared = prepare(job({"checkpoint_seconds": seconds}), "make it", declared=())

    assert prepared.checkpoints is checkpoints


def test_an_empty_name_is_no_file() -> None:
    assert prepare(job({"exclude_file": ""}), "make it", declared=()).exclude_file is None


def test_a_groups_cpus_are_those_that_its_jobs_need_at_once() -> None:
    prepared = prepare(group({"_cores": 6}), "make it", declared=())

    assert prepared.parameters["cpus_per_task"] == 6


def test_an_impossible_resource_is_refused_before_anything_is_submitted() -> None:
    with pytest.raises(ResourceError, match="runtime"):
        prepare(job({"runtime": -1}), "make it", declared=())


def test_a_followed_log_is_named_by_rule_wildcards_and_job() -> None:
    assert label(job({}, seed="1", model="a b"), ENTRY) == "train 1 'a b' 7_3"
    assert label(group({}), ENTRY) == "pair 7_3"
