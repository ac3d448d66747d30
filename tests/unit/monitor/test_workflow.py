"""Who runs a workflow, and its jobs out of journals that the executor itself has written."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.errors import UsageError
from shakedown.core.paths import RunPaths
from shakedown.monitor.workflow import NotedJob, WorkflowRun, noted_jobs, read_workflow
from snakemake_executor_plugin_submitit.identity import JobIdentity
from snakemake_executor_plugin_submitit.journal import Entry, JobJournal, name_ending


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a snakemake."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def new_journal(folder: Path) -> Iterator[Callable[[], JobJournal]]:
    made: list[JobJournal] = []

    def make() -> JobJournal:
        made.append(JobJournal(folder / "jobs"))
        return made[-1]

    yield make
    for journal in made:
        journal.close()


def entry(journal: JobJournal, number: int, job_id: str, *makes: str) -> Entry:
    return Entry(
        identity=JobIdentity(makes, "how"),
        label="train",
        job_id=job_id,
        name=f"train{name_ending(journal.run, number)}",
        cluster="",
        token=f"{number}-0",
        run=journal.run,
        log=f"/logs/{job_id}.log",
    )


def test_jobs_are_found_by_what_they_make_from_any_folder(
    folder: Path, new_journal: Callable[[], JobJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = new_journal()
    first = entry(journal, 1, "11", "results/demo/preflight/verdict.json", "results/demo/x")
    second = entry(journal, 2, "12_3", str(folder / "results/demo/stages/sft/outcome.json"))
    other = entry(journal, 3, "13", "results/other/stages/sft/outcome.json")
    journal.jobs([first, second, other])
    journal.refused(f"train{name_ending(journal.run, 4)}")
    journal.renamed(second, "lab_train")
    journal.end(first, "failed")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")

    found = {job.folder: job for job in noted_jobs(folder / "jobs", Path("../results/demo"))}

    assert set(found) == {"preflight", ".", "stages/sft"}
    assert (found["preflight"].job_id, found["preflight"].outcome) == ("11", "failed")
    assert found["stages/sft"] == NotedJob(
        "stages/sft", "12_3", "lab_train", "", Path("/logs/12_3.log")
    )


def test_of_several_jobs_of_a_step_the_newest_counts_and_an_end_is_its_own(
    folder: Path, new_journal: Callable[[], JobJournal]
) -> None:
    made = "results/demo/stages/sft/outcome.json"
    old = new_journal()
    taken = entry(old, 1, "11", made)
    old.jobs([taken])
    (folder / "jobs" / old.run).rename(folder / "jobs" / f"0{old.run}")  # surely the older one
    new = new_journal()
    tried, again = entry(new, 1, "12", made), entry(new, 2, "13", made)
    new.jobs([tried])
    new.jobs([again])
    new.end(tried, "failed")

    (found,) = noted_jobs(folder / "jobs", folder / "results" / "demo")

    assert (found.job_id, found.outcome) == ("13", "")


def test_a_journal_that_a_crash_cut_short_or_that_lies_gives_what_is_sound(
    folder: Path, new_journal: Callable[[], JobJournal]
) -> None:
    journal = new_journal()
    journal.jobs([entry(journal, 1, "--user=root", "results/demo/agents/verdict.json")])
    journal.jobs([entry(journal, 2, "12", "results/demo/preflight/verdict.json")])
    with (journal.folder / "journal.jsonl").open("a") as stream:
        stream.write('[]\n"x"\n{"event": "job", "token": 7}\n{"event": "job", "to')

    found = noted_jobs(folder / "jobs", folder / "results" / "demo")

    assert [job.job_id for job in found] == ["12"]


def test_nothing_was_submitted_where_the_executor_has_no_folder(folder: Path) -> None:
    assert noted_jobs(folder / "none", folder) == []


def test_a_workflow_lives_as_long_as_its_process(folder: Path) -> None:
    path = RunPaths(folder).workflow
    code = (
        "import sys; from pathlib import Path\n"
        "from shakedown.monitor.workflow import WorkflowRun\n"
        f"WorkflowRun.here('jobs').write(Path({str(path)!r})); print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = read_workflow(path)
        assert found is not None
        assert (found.pid, found.lives) == (process.pid, True)
        assert (found.folder, found.jobs) == (str(folder), str(folder / "jobs"))
        process.kill()

    assert found.lives is False


def test_a_process_of_another_host_cannot_be_seen(folder: Path) -> None:
    own = WorkflowRun.here("jobs")

    assert WorkflowRun(own.folder, own.jobs, "elsewhere", os.getpid(), 1, own.boot).lives is None


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"schema": "shakedown/workflow/1", "pid": "x"}'])
def test_a_broken_record_is_a_usage_error(folder: Path, body: str) -> None:
    path = RunPaths(folder).workflow
    path.write_text(body)

    with pytest.raises(UsageError):
        read_workflow(path)


def test_a_run_without_a_record_has_no_workflow(folder: Path) -> None:
    found: Any = read_workflow(RunPaths(folder).workflow)

    assert found is None
