"""Which nodes come under suspicion, and how jobs are kept off those that are bad."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit.exclusion import (
    NodeHistory,
    nodes_of_file,
    with_excluded,
)
from snakemake_executor_plugin_submitit.resources import ResourceError
from snakemake_executor_plugin_submitit.slurm import JobState


def suspects(*polls: JobState) -> list[set[str]]:
    """Where the interrupted job ran, for each poll about it."""
    history = NodeHistory()
    return [set(history.suspects({"7": job}).values()) for job in polls]


def running(nodes: str) -> JobState:
    return JobState("RUNNING", nodes=nodes)


@pytest.mark.parametrize(
    "later",
    [
        JobState("PENDING"),
        JobState("REQUEUED"),
        running("n2"),
        JobState("NODE_FAIL", nodes="n1"),
        JobState("PREEMPTED", nodes="n1"),
    ],
)
def test_a_job_that_left_its_node_without_an_end_makes_it_suspicious(later: JobState) -> None:
    assert suspects(running("n1"), later) == [set(), {"n1"}]


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY"])
def test_a_job_that_ended_makes_none(state: str) -> None:
    assert suspects(running("n1"), JobState(state, nodes="n1")) == [set(), set()]


def test_a_job_that_runs_on_or_waits_for_its_first_node_makes_none() -> None:
    waits = JobState("PENDING")

    assert suspects(waits, waits, running("n1"), running("n1")) == [set()] * 4
    assert suspects(running("n1"), JobState("SUSPENDED", nodes="n1"), running("n1")) == [set()] * 3


def test_a_suspicion_is_raised_once() -> None:
    gone = JobState("PENDING")

    assert suspects(running("n[1-2]"), gone, gone, running("n3"), gone) == [
        set(),
        {"n[1-2]"},
        set(),
        set(),
        {"n3"},
    ]


def test_what_follows_completing_tells_whether_a_node_was_lost() -> None:
    # A job of several nodes leaves them one after the other, at a good end too.
    leaving = [JobState("COMPLETING", nodes="n[1-2]"), JobState("COMPLETING", nodes="n2")]

    assert suspects(running("n[1-2]"), *leaving, JobState("COMPLETED"))[-1] == set()
    assert suspects(running("n[1-2]"), *leaving, JobState("PENDING"))[-1] == {"n[1-2]"}


def test_a_job_that_is_not_spoken_of_is_remembered() -> None:
    history = NodeHistory()
    history.suspects({"7": running("n1"), "8": running("n2")})
    history.suspects({"8": running("n2")})

    assert history.suspects({"7": JobState("PENDING"), "8": running("n2")}) == {"7": "n1"}


def test_a_requeue_between_two_polls_is_noticed_by_what_the_job_waits_for() -> None:
    requeued = JobState("PENDING", reason="BeginTime")

    assert suspects(requeued, requeued, running("n2"), requeued) == [{""}, set(), set(), {"n2"}]


def test_the_database_accuses_the_node_of_a_job_that_had_only_one() -> None:
    history = NodeHistory()
    history.unexplained = {"1", "2", "3", "4"}

    failed = history.explain(
        {
            "1": JobState("NODE_FAIL", nodes="n1"),
            "2": JobState("NODE_FAIL", nodes="n[2-3]"),
            "3": JobState("PREEMPTED", nodes="n4"),
            "9": JobState("NODE_FAIL", nodes="n9"),
        }
    )

    assert failed == {"n1"}
    assert history.unexplained == {"4"}


def test_bad_nodes_join_those_that_a_job_avoids_already() -> None:
    given = {"exclude": "n[1-3,7],gpu-1", "mem": "1M"}

    joined = with_excluded(given, {"n9", "gpu-1", "a[1-2]"})

    assert joined == {"exclude": "n[1-3,7],gpu-1,a[1-2],n9", "mem": "1M"}
    assert given["exclude"] == "n[1-3,7],gpu-1"


def test_no_bad_node_leaves_the_parameters_alone() -> None:
    assert with_excluded({"mem": "1M"}, []) == {"mem": "1M"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bad_nodes.txt"


def test_a_files_nodes_come_one_a_line_with_comments(file: Path) -> None:
    file.write_text("# slow\nn1\n\n  n[2-3]  # link\r\nn1\nn4,n5")

    assert nodes_of_file(file) == ["n1", "n[2-3]", "n4", "n5"]


@pytest.mark.parametrize("text", ["", "\n\n", "# none\n"])
def test_an_empty_file_names_none(file: Path, text: str) -> None:
    file.write_text(text)

    assert nodes_of_file(file) == []


def test_a_file_that_is_not_there_names_none(file: Path) -> None:
    assert nodes_of_file(file) == []


@pytest.mark.parametrize(
    "text", ["n1 n2", "None assigned", "--wrap=x", "n1\n$(id)", "<html>", "n1\0", '{"n1": 1}']
)
def test_a_file_of_anything_else_is_refused_by_its_path(file: Path, text: str) -> None:
    file.write_text(text)

    with pytest.raises(ResourceError, match=r"bad_nodes\.txt.*is not a node name"):
        nodes_of_file(file)


def test_a_file_that_cannot_be_read_is_refused_by_its_path(file: Path) -> None:
    file.write_bytes(b"n1\n\xff\xfe\n")
    with pytest.raises(ResourceError, match=r"bad_nodes\.txt.*decode"):
        nodes_of_file(file)
    file.write_text("n1\n" * 400_000)
    with pytest.raises(ResourceError, match="more than 1048576 characters"):
        nodes_of_file(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(ResourceError, match="directory"):
        nodes_of_file(file)
