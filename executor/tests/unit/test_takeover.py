"""What the outbox's thread does with jobs of an earlier run that wait to be taken over."""

import os
from pathlib import Path

import pytest
from entries import entry, identity
from sender_desk import Cluster, Desk, ready
from slurm_programs import Programs

from snakemake_executor_plugin_submitit import sending
from snakemake_executor_plugin_submitit.journal import Entry
from snakemake_executor_plugin_submitit.reattach import Candidate


def earlier(desk: Desk, *makes: str, live: bool, how: str = "so") -> Entry:
    """A job that an earlier run has left, as a candidate of this one."""
    found = entry(f"90_{'ab'.index(makes[0])}", identity=identity(*makes, how=how))
    (desk.journal.base / found.run).mkdir(exist_ok=True)
    desk.candidates.add(Candidate(found, live=live))
    return found


def runs_until_cancelled(programs: Programs, job: Entry) -> None:
    programs.answer("squeue", f"{job.job_id}|RUNNING|None|n1|N/A|{job.name}\n")
    scancel = Path(os.environ["PATH"]) / "scancel"
    forget = f": > {scancel.with_name('squeue.out')}"
    scancel.write_text(scancel.read_text().replace("exit 0", f"{forget}\nexit 0"))


def noted_ends(desk: Desk, ended: Entry) -> list[str]:
    path = desk.journal.base / ended.run / "journal.jsonl"
    return [line for line in path.read_text().splitlines() if line] if path.exists() else []


@pytest.mark.parametrize("live", [True, False])
def test_an_earlier_runs_job_is_taken_over_once_and_not_submitted(
    desk: Desk, cluster: Cluster, live: bool
) -> None:
    earlier(desk, "a", live=live)
    sender = desk.sender()

    sender.send([ready("a"), ready("b")])
    first = dict(desk.reports.job_ids)
    sender.send([ready("a")])  # it failed and is tried again

    assert first == {"a": "90_0", "b": "1_0"}
    assert desk.reports.taken == {"a"}
    assert desk.reports.job_ids["a"] == "2_0"
    assert len(cluster.batches) == 2


def test_an_outdated_job_is_ended_before_its_successor_is_submitted(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    old = earlier(desk, "a", live=True, how="otherwise")
    runs_until_cancelled(programs, old)

    desk.sender().send([ready("a")])

    (call,) = [call for call in programs.calls if call.startswith("scancel")]
    assert call == "scancel --quiet 90_0"
    assert desk.reports.job_ids == {"a": "1_0"}
    assert desk.reports.taken == set()
    assert "outdated" in noted_ends(desk, old)[-1]
    assert len(cluster.batches) == 1


def test_an_outdated_job_that_does_not_end_keeps_its_successor_back(
    desk: Desk, cluster: Cluster, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_CANCEL_PATIENCE", -1.0)
    old = earlier(desk, "a", live=True, how="otherwise")
    programs.answer("squeue", f"{old.job_id}|COMPLETING|None|n1|N/A|{old.name}\n")

    desk.sender().send([ready("a"), ready("b")])

    assert "next: scancel 90_0" in desk.reports.words["a"]
    assert desk.reports.job_ids == {"b": "1_0"}
    assert noted_ends(desk, old) == []
    assert len(cluster.batches) == 1


def test_an_error_at_a_takeover_is_reported_and_ends_no_other_job(
    desk: Desk, cluster: Cluster
) -> None:
    old = earlier(desk, "a", live=False, how="otherwise")
    (desk.journal.base / old.run).rmdir()

    desk.sender().send([ready("a"), ready("b")])

    assert "FileNotFoundError" in desk.reports.words["a"]
    assert desk.reports.job_ids == {"b": "1_0"}
    assert len(cluster.batches) == 1


def test_ended_jobs_that_nobody_asked_for_are_closed_and_running_ones_stay(desk: Desk) -> None:
    ended, runs = earlier(desk, "a", live=False), earlier(desk, "b", live=True)

    desk.sender().forget_unused()

    (line,) = noted_ends(desk, ended)
    assert ended.token in line
    assert runs.token not in line


@pytest.mark.parametrize("makes", [("a", "b"), ("a",), ("a", "b", "c")])
def test_a_job_that_makes_a_part_of_the_same_is_ended_first(
    desk: Desk, cluster: Cluster, programs: Programs, makes: tuple[str, ...]
) -> None:
    """Else it would write its old version over the new one when it ends."""
    old = earlier(desk, *makes, live=True)
    runs_until_cancelled(programs, old)

    desk.sender().send([ready("a", "d")])

    assert desk.reports.job_ids == {"a+d": "1_0"}
    assert programs.called("scancel") == 1
    assert "outdated" in noted_ends(desk, old)[-1]
    assert len(cluster.batches) == 1


def test_of_two_jobs_that_make_the_same_the_right_one_is_taken_and_the_other_ended(
    desk: Desk, cluster: Cluster, programs: Programs
) -> None:
    outdated = earlier(desk, "a", live=True, how="otherwise")
    desk.candidates.add(Candidate(entry("91", identity=identity("a")), live=True))

    desk.sender().send([ready("a")])

    assert desk.reports.job_ids == {"a": "91"}
    assert "outdated" in noted_ends(desk, outdated)[-1]
    assert cluster.batches == []
