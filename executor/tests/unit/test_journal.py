"""The journal survives what a killed snakemake leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit import reattach, slurm
from snakemake_executor_plugin_submitit.journal import (
    Entry,
    Journal,
    JournalError,
    open_runs,
    prune,
)
from snakemake_executor_plugin_submitit.slurm import JobState

DEAD_RUN = """
import sys
from pathlib import Path
from snakemake_executor_plugin_submitit.journal import Entry, Journal
journal = Journal(Path(sys.argv[1]))
for tag, ids in (("a", ["7_0", "7_1"]), ("b", ["8"]), ("lost", [])):
    journal.batch(f"{journal.run}.{tag}")
    journal.jobs(
        Entry(f"key {i}", "print", i, f"token {i}", f"{journal.run}.{tag}", journal.run, 1000.0)
        for i in ids
    )
journal.end(Entry("key 8", "print", "8", "token 8", "b", journal.run, 1000.0), "succeeded")
print(journal.run)
"""


@pytest.fixture
def dead_run(tmp_path: Path) -> str:
    """The name of a run with open jobs 7_0 and 7_1, one ended and one batch without jobs."""
    done = subprocess.run(
        [sys.executable, "-c", DEAD_RUN, tmp_path], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """The journal of a run that lives."""
    with closing(Journal(tmp_path)) as journal:
        yield journal


def test_a_dead_runs_open_ends_are_found(tmp_path: Path, dead_run: str) -> None:
    (run,) = open_runs(tmp_path)

    assert run.name == dead_run
    assert [entry.job_id for entry in run.jobs.values()] == ["7_0", "7_1"]
    assert run.lost_tags == {f"{dead_run}.lost"}


def test_a_living_runs_jobs_are_not_for_the_taking(tmp_path: Path, journal: Journal) -> None:
    journal.batch("tag")

    while_it_lives = open_runs(tmp_path)
    journal.close()

    assert while_it_lives == []
    assert [run.name for run in open_runs(tmp_path)] == [journal.run]


def test_a_line_that_a_crash_cut_short_is_skipped(
    tmp_path: Path, dead_run: str, journal: Journal
) -> None:
    path = tmp_path / dead_run / "journal.jsonl"
    with path.open("a") as stream:
        stream.write('{"event": "job", "key": "ha')

    (run,) = open_runs(tmp_path)
    journal.end(run.jobs["token 7_0"], "failed")

    (run,) = open_runs(tmp_path)
    assert [entry.job_id for entry in run.jobs.values()] == ["7_1"]


def test_a_journal_of_another_form_is_refused_with_its_path(tmp_path: Path, dead_run: str) -> None:
    path = tmp_path / dead_run / "journal.jsonl"
    with path.open("a") as stream:
        stream.write('\n{"event": "job", "colour": "green"}\n')

    with pytest.raises(JournalError, match=dead_run):
        open_runs(tmp_path)


def test_a_closed_run_is_pruned_and_an_open_one_kept(
    tmp_path: Path, dead_run: str, journal: Journal
) -> None:
    prune(tmp_path, keep=0)
    kept = (tmp_path / dead_run).exists()
    journal.close_run(dead_run)
    prune(tmp_path, keep=0)

    assert kept
    assert not (tmp_path / dead_run).exists()
    assert journal.folder.exists()


class FakeSlurm:
    """Slurm's answers, and what it was told to cancel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, states: dict[str, JobState]) -> None:
        self.cancelled: list[str] = []
        monkeypatch.setattr(slurm, "states", lambda ids: {i: states[i] for i in ids if i in states})
        monkeypatch.setattr(
            slurm, "tagged", lambda tags: {f"job of {tag}": JobState("PENDING") for tag in tags}
        )
        monkeypatch.setattr(slurm, "cancel", self.cancelled.extend)


def write_success(path: Path) -> None:
    path.write_text(
        '{"exit_code": 0, "host": "n1", "slurm_job": "7", "restart": 0, "started": 1, "ended": 2}'
    )


def test_live_and_succeeded_jobs_are_candidates_and_lost_batches_are_cancelled(
    tmp_path: Path, dead_run: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(monkeypatch, {"7_0": JobState("RUNNING", comment=f"{dead_run}.a")})
    write_success(tmp_path / dead_run / "results" / "token 7_1.json")

    found = reattach.find(journal)

    assert {key: candidate.live for key, candidate in found.items()} == {
        "key 7_0": True,
        "key 7_1": False,
    }
    assert fake.cancelled == [f"job of {dead_run}.lost"]


def test_a_run_of_which_nothing_is_left_is_closed(
    tmp_path: Path, dead_run: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = f"{dead_run}.a"
    ended = {"7_0": JobState("FAILED", comment=tag), "7_1": JobState("CANCELLED", comment=tag)}
    FakeSlurm(monkeypatch, ended)

    found = reattach.find(journal)

    assert found == {}
    assert open_runs(tmp_path) == []
    assert (tmp_path / dead_run).exists()


@pytest.mark.parametrize("comment", ["", "lab", "20200101-000000-abcdef.a"])
def test_a_running_job_of_the_same_id_but_another_tag_is_not_taken_over(
    dead_run: str, journal: Journal, monkeypatch: pytest.MonkeyPatch, comment: str
) -> None:
    stranger = JobState("RUNNING", comment=comment)
    fake = FakeSlurm(monkeypatch, {"7_0": stranger, "7_1": stranger})

    found = reattach.find(journal)

    assert found == {}
    assert fake.cancelled == [f"job of {dead_run}.lost"]


def test_an_interrupted_job_may_be_taken_over(
    dead_run: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = f"{dead_run}.a"
    FakeSlurm(monkeypatch, {"7_0": JobState("PREEMPTED", comment=tag)})

    found = reattach.find(journal)

    assert found["key 7_0"].live


def test_the_folders_are_closed_to_others(tmp_path: Path) -> None:
    base = tmp_path / "open to all"
    base.mkdir(mode=0o777)

    with closing(Journal(base)) as journal:
        modes = [folder.stat().st_mode & 0o777 for folder in (base, journal.folder)]

    assert modes == [0o700, 0o700]


def test_an_ended_job_is_stale_when_an_input_is_newer(tmp_path: Path) -> None:
    entry = Entry("key", "print", "7", "token", "tag", "run", submitted=1000.0)
    source = tmp_path / "input"
    source.touch()

    os.utime(source, (999, 999))
    fresh = reattach.is_stale(reattach.Candidate(entry, live=False), "print", [str(source)])
    os.utime(source, (1001, 1001))
    stale = reattach.is_stale(reattach.Candidate(entry, live=False), "print", [str(source)])

    assert not fresh
    assert stale


def test_a_job_with_another_command_is_stale() -> None:
    entry = Entry("key", "print", "7", "token", "tag", "run", submitted=1000.0)

    assert reattach.is_stale(reattach.Candidate(entry, live=True), "other", [])


class Cancelling:
    """Slurm that ends a cancelled job after some questions; `pauses` in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, entry: Entry, questions: int) -> None:
        self.cancelled: list[str] = []
        self.pauses: list[float] = []
        self._left = questions
        self._entry = entry
        monkeypatch.setattr(slurm, "states", self._states)
        monkeypatch.setattr(slurm, "cancel", self.cancelled.extend)

    def _states(self, ids: list[str]) -> dict[str, JobState]:
        self._left -= 1
        state = "COMPLETING" if self._left >= 0 else "CANCELLED"
        return {i: JobState(state, comment=self._entry.tag) for i in ids}

    def wait(self) -> bool:
        return reattach.cancel_and_wait(
            self._entry, seconds=10, sleep=self.pauses.append, clock=lambda: sum(self.pauses)
        )


@pytest.mark.parametrize(("questions", "ends"), [(0, True), (3, True), (99, False)])
def test_an_outdated_job_is_cancelled_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, questions: int, ends: bool
) -> None:
    entry = Entry("key", "print", "7_1", "token", "tag", "run", submitted=1000.0)
    cluster = Cancelling(monkeypatch, entry, questions)

    gone = cluster.wait()

    assert gone is ends
    assert cluster.cancelled == ["7_1"]
    assert len(cluster.pauses) == min(questions, 11)
