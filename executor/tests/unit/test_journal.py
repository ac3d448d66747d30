"""The journal survives what a killed snakemake leaves behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from entries import entry, identity

from snakemake_executor_plugin_submitit import reattach, slurm
from snakemake_executor_plugin_submitit.identity import WorkingFolder
from snakemake_executor_plugin_submitit.journal import (
    Entry,
    JobJournal,
    JournalError,
    name_ending,
    open_runs,
    prune,
)
from snakemake_executor_plugin_submitit.slurm import JobState

DEAD_RUN = """
import sys
from pathlib import Path
from entries import entry
from snakemake_executor_plugin_submitit.journal import JobJournal, name_ending
journal = JobJournal(Path(sys.argv[1]))
for name, ids in (("a", ["7_0", "7_1"]), ("b", ["8"]), ("lost", [])):
    full = f"{name}{name_ending(journal.run, 1)}"
    journal.batch(full, "")
    journal.jobs(entry(i, name=full, run=journal.run) for i in ids)
    if name == "b":
        journal.end(entry("8", name=full, run=journal.run), "succeeded")
print(journal.run)
"""


def of(run: str, name: str) -> str:
    """A name that `run` has given to a job."""
    return f"{name}{name_ending(run, 1)}"


@pytest.fixture
def dead_run(tmp_path: Path) -> str:
    """The name of a run with open jobs 7_0 and 7_1, one ended and one batch without jobs."""
    done = subprocess.run(
        [sys.executable, "-c", DEAD_RUN, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[JobJournal]:
    """The journal of a run that lives."""
    with closing(JobJournal(tmp_path)) as journal:
        yield journal


def test_a_dead_runs_open_ends_are_found(tmp_path: Path, dead_run: str) -> None:
    (run,) = open_runs(tmp_path, WorkingFolder.here())

    assert run.name == dead_run
    assert [entry.job_id for entry in run.jobs.values()] == ["7_0", "7_1"]
    assert run.lost == {of(dead_run, "lost"): ""}


def test_a_living_runs_jobs_are_not_for_the_taking(tmp_path: Path, journal: JobJournal) -> None:
    journal.batch(of(journal.run, "train"), "")

    while_it_lives = open_runs(tmp_path, WorkingFolder.here())
    journal.close()

    assert while_it_lives == []
    assert [run.name for run in open_runs(tmp_path, WorkingFolder.here())] == [journal.run]


def test_a_line_that_a_crash_cut_short_is_skipped(
    tmp_path: Path, dead_run: str, journal: JobJournal
) -> None:
    path = tmp_path / dead_run / "journal.jsonl"
    with path.open("a") as stream:
        stream.write('{"event": "job", "name": "ha')

    (run,) = open_runs(tmp_path, WorkingFolder.here())
    journal.end(run.jobs["1-7_0"], "failed")

    (run,) = open_runs(tmp_path, WorkingFolder.here())
    assert [entry.job_id for entry in run.jobs.values()] == ["7_1"]


def test_a_journal_of_another_form_is_refused_with_its_path(tmp_path: Path, dead_run: str) -> None:
    path = tmp_path / dead_run / "journal.jsonl"
    with path.open("a") as stream:
        stream.write('\n{"event": "job", "colour": "green"}\n')

    with pytest.raises(JournalError, match=dead_run):
        open_runs(tmp_path, WorkingFolder.here())


def test_a_closed_run_is_pruned_and_an_open_one_kept(
    tmp_path: Path, dead_run: str, journal: JobJournal
) -> None:
    prune(tmp_path, keep=0)
    kept = (tmp_path / dead_run).exists()
    journal.close_run(dead_run)
    prune(tmp_path, keep=0)

    assert kept
    assert not (tmp_path / dead_run).exists()
    assert journal.folder.exists()


def test_a_journal_of_an_earlier_version_is_no_hindrance_when_it_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "20200101-000000-ffffff"
    folder.mkdir()
    old = '{"event": "job", "key": "a", "tag": "b"}\n'

    (folder / "journal.jsonl").write_text(old)
    with pytest.raises(JournalError, match="squeue --me"):
        open_runs(tmp_path, WorkingFolder.here())
    (folder / "journal.jsonl").write_text(f'{old}{{"event": "closed"}}\n')

    assert open_runs(tmp_path, WorkingFolder.here()) == []


def test_the_runs_of_another_working_directory_are_left_alone(
    tmp_path: Path, dead_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / dead_run / "journal.jsonl").open("a") as stream:
        stream.write('{"event": "job", "colour": "green"}')
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")

    assert open_runs(tmp_path, WorkingFolder.here()) == []


def test_a_refused_batch_is_not_lost_and_a_renamed_job_is_known_by_both_names(
    tmp_path: Path, journal: JobJournal
) -> None:
    refused, given = of(journal.run, "refused"), of(journal.run, "given")
    for name in (refused, given):
        journal.batch(name, "")
    journal.refused(refused)
    noted = entry("7", name=given, run=journal.run)
    journal.jobs([noted])
    journal.renamed(noted, "lab_given")
    journal.close()

    (run,) = open_runs(tmp_path, WorkingFolder.here())

    (found,) = run.jobs.values()
    assert run.lost == {}
    assert (found.name, found.known_as) == (given, "lab_given")


# --- files


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_jobs_result_becomes_a_mark_and_all_files_of_a_batch_go_with_its_last_job(
    journal: JobJournal,
) -> None:
    jobs, results = journal.folder / "jobs", journal.folder / "results"
    own = {"name": of(journal.run, "a"), "run": journal.run}
    batch = [entry(f"7_{index}", token=f"1-{index}", **own) for index in range(3)]
    journal.jobs([*batch, entry("8", token="11-0", **own)])
    for path in (jobs / "1.json", jobs / "11.json", jobs / "11-0.ended", results / "1-0.json"):
        path.write_text(path.name)

    journal.end(batch[0], "succeeded")
    journal.end(batch[1], "failed")  # without a result
    journal.end(batch[1], "failed")
    marked, left = names(jobs), names(results)
    (results / "1-2.json").touch()
    journal.end(batch[2], "succeeded")

    assert marked == {"1.json", "1-0.ended", "1-1.ended", "11.json", "11-0.ended"}
    assert left == set()
    assert names(jobs) == {"11.json", "11-0.ended"}
    assert names(results) == set()


def test_the_files_of_an_earlier_run_go_as_its_jobs_end(
    tmp_path: Path, dead_run: str, journal: JobJournal
) -> None:
    jobs = tmp_path / dead_run / "jobs"
    (jobs / "1.json").touch()
    (run,) = open_runs(tmp_path, WorkingFolder.here())
    journal.adopt(run.jobs.values())

    journal.end(run.jobs["1-7_0"], "succeeded")
    first = names(jobs)
    journal.end(run.jobs["1-7_1"], "outdated")

    assert {"1.json", "1-7_0.ended"} <= first
    assert names(jobs) == set()


# --- jobs of an earlier run


class FakeSlurm:
    """Slurm's answers, and what it was told to cancel."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, run: str, states: dict[str, JobState]
    ) -> None:
        self.cancelled: list[str] = []
        known = {**states, "9_0": JobState("PENDING", name=of(run, "lost"))}
        monkeypatch.setattr(
            slurm, "states", lambda ids, _cluster: {i: known[i] for i in ids if i in known}
        )
        monkeypatch.setattr(slurm, "unfinished", lambda _cluster: known)
        monkeypatch.setattr(slurm, "cancel", self._cancel)

    def _cancel(self, ids: list[str], *, cluster: str = "") -> None:
        assert cluster == ""
        self.cancelled += ids


def write_success(path: Path) -> None:
    path.write_text(
        '{"exit_code": 0, "host": "n1", "slurm_job": "7", "restart": 0, "started": 1, "ended": 2}'
    )


def live_by_id(found: list[reattach.Candidate]) -> dict[str, bool]:
    return {candidate.entry.job_id: candidate.live for candidate in found}


def test_live_and_succeeded_jobs_are_candidates_and_lost_batches_are_cancelled(
    tmp_path: Path, dead_run: str, journal: JobJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSlurm(monkeypatch, dead_run, {"7_0": JobState("RUNNING", name=of(dead_run, "a"))})
    write_success(tmp_path / dead_run / "results" / "1-7_1.json")

    found = reattach.find(journal)

    assert live_by_id(found) == {"7_0": True, "7_1": False}
    assert fake.cancelled == ["9"]


def test_a_run_of_which_nothing_is_left_is_closed(
    tmp_path: Path, dead_run: str, journal: JobJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = of(dead_run, "a")
    ended = {"7_0": JobState("FAILED", name=ours), "7_1": JobState("CANCELLED", name=ours)}
    FakeSlurm(monkeypatch, dead_run, ended)

    found = reattach.find(journal)

    assert found == []
    assert open_runs(tmp_path, WorkingFolder.here()) == []
    assert (tmp_path / dead_run).exists()


@pytest.mark.parametrize("name", ["", "lab", "b", "a.2"])
def test_a_running_job_of_the_same_id_but_another_name_is_not_taken_over(
    dead_run: str, journal: JobJournal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stranger = JobState("RUNNING", name=name)
    fake = FakeSlurm(monkeypatch, dead_run, {"7_0": stranger, "7_1": stranger})

    found = reattach.find(journal)

    assert found == []
    assert fake.cancelled == ["9"]


def test_an_interrupted_job_may_be_taken_over(
    dead_run: str, journal: JobJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSlurm(monkeypatch, dead_run, {"7_0": JobState("PREEMPTED", name=of(dead_run, "a"))})

    assert live_by_id(reattach.find(journal)) == {"7_0": True}


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o2770])
def test_a_folder_that_was_there_keeps_its_mode_and_a_runs_is_closed_to_others(
    tmp_path: Path, mode: int
) -> None:
    base = tmp_path / "open to all"
    base.mkdir()
    base.chmod(mode)

    with closing(JobJournal(base)) as journal:
        folders = [journal.folder, *(p for p in journal.folder.iterdir() if p.is_dir())]

    assert base.stat().st_mode & 0o7777 == mode
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert len(folders) == 4


class Cancelling:
    """Slurm that ends a cancelled job after some questions; `pauses` in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: Entry, questions: int) -> None:
        self.cancelled: list[str] = []
        self.pauses: list[float] = []
        self._left = questions
        self._job = job
        monkeypatch.setattr(slurm, "states", self._states)
        monkeypatch.setattr(slurm, "cancel", self._cancel)

    def _cancel(self, ids: list[str], *, cluster: str) -> None:
        assert cluster == self._job.cluster
        self.cancelled += ids

    def _states(self, ids: list[str], _cluster: str) -> dict[str, JobState]:
        self._left -= 1
        state = "COMPLETING" if self._left >= 0 else "CANCELLED"
        return {i: JobState(state, name=self._job.name) for i in ids}

    def wait(self) -> bool:
        return reattach.cancel_and_wait(
            self._job, seconds=10, sleep=self.pauses.append, clock=lambda: sum(self.pauses)
        )


@pytest.mark.parametrize(("questions", "ends"), [(0, True), (3, True), (99, False)])
def test_an_outdated_job_is_cancelled_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, questions: int, ends: bool
) -> None:
    cluster = Cancelling(monkeypatch, entry("7_1"), questions)

    gone = cluster.wait()

    assert gone is ends
    assert cluster.cancelled == (["7_1"] if questions else [])
    assert len(cluster.pauses) == max(0, min(questions - 1, 11))


def test_the_newest_of_equal_jobs_is_taken_and_the_others_are_in_its_way() -> None:
    jobs = [entry(job_id, identity=identity("a")) for job_id in ("7", "8")]
    other = entry("9", identity=identity("b"))
    waiting = reattach.Candidates(reattach.Candidate(job, live=True) for job in [*jobs, other])

    same, others = waiting.take(identity("a"))

    assert same is not None
    assert same.entry.job_id == "8"
    assert [candidate.entry.job_id for candidate in others] == ["7"]
    assert [candidate.entry.job_id for candidate in waiting] == ["9"]
    assert waiting.take(identity("a")) == (None, [])
