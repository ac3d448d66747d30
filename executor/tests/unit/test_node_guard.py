"""Which nodes a run's jobs are kept off, asked of programs that answer as Slurm does."""

from pathlib import Path

import pytest
from entries import NAME, entry
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.exclusion import NodeGuard
from snakemake_executor_plugin_submitit.slurm import JobState

RUNS = JobState("RUNNING", nodes="n1", name=NAME)
WAITS = JobState("PENDING", "BeginTime", name=NAME)
OTHER = JobState("PENDING", "Resources", name=NAME)


class Guarded:
    """A guard of a cluster of which n1 is down, and what it has said."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
        self.said: list[str] = []
        self.guard = NodeGuard(self.said.append)
        self.programs = Programs(folder, monkeypatch)
        self.programs.answer("squeue", "8|(null)\n")
        self.programs.answer("scontrol")
        names = [f"n{number + 1}" for number in range(nodes)]
        sinfo = folder / "sinfo"
        self.programs.answer("sinfo")
        every = "\\n".join(names)
        sinfo.write_text(
            f'#!/bin/sh\ncase "$*" in *--nodes*) echo "n1|down*";; *) printf "{every}\\n";; esac\n'
        )

    def lose(self, cluster: str = "") -> None:
        """A job runs on n1, then waits to run again; another one waits as well."""
        job, other = entry("7", cluster=cluster), entry("8", cluster=cluster)
        self.guard.look({job: RUNS, other: OTHER}, has_accounting=False)
        self.guard.look({job: WAITS, other: OTHER}, has_accounting=False)

    def updates(self) -> list[str]:
        return [call for call in self.programs.calls if call.startswith("scontrol update")]


def test_a_lost_node_is_kept_off_jobs_to_come_and_jobs_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded(tmp_path, monkeypatch, nodes=2)

    guarded.lose()

    assert guarded.guard.lost == {"n1"}
    assert guarded.updates() == ["scontrol update JobId=8 ExcNodeList=n1"]
    assert guarded.said == ["lost n1: excluded for the rest of this run"]


def test_when_most_of_the_cluster_is_lost_nothing_is_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut of all nodes nothing would ever run again."""
    guarded = Guarded(tmp_path, monkeypatch, nodes=1)

    guarded.lose()

    assert guarded.guard.lost == set()
    assert guarded.updates() == []
    assert "most of the cluster's 1 node(s)" in guarded.said[0]


def test_nodes_of_another_cluster_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded(tmp_path, monkeypatch, nodes=9)

    guarded.lose(cluster="east")

    assert guarded.guard.lost == set()
    assert guarded.programs.calls == []
