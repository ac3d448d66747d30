"""The executor's files, planted or changed by another user of the machine: nobody obeys them."""

import dataclasses
import json
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit import journal, node, private
from snakemake_executor_plugin_submitit.identity import WorkingFolder
from tests.security.neighbour import as_neighbour


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    with closing(journal.JobJournal(tmp_path / "submitit")) as mine:
        yield mine.folder


def test_a_job_file_that_others_can_write_runs_nothing(run_folder: Path) -> None:
    mark = run_folder / "ran"
    path = run_folder / "jobs" / "1.json"
    node.write_batch(path, [f"touch {mark}"], node.BatchWork())
    for place, mode in ((path, 0o660), (path.parent, 0o770)):
        before = stat.S_IMODE(place.stat().st_mode)
        place.chmod(mode)

        with pytest.raises(SystemExit, match=r"nothing was run: .* can be written by others"):
            node.main(run_folder, "1")
        place.chmod(before)

    assert not mark.exists()
    assert not list((run_folder / "results").iterdir())


def test_a_neighbours_job_file_or_result_is_not_believed(shared: Path) -> None:
    folder = shared / "20260101-000000-deadbeef"
    as_neighbour("mkdir", "-p", folder / "jobs", folder / "results")
    as_neighbour("sh", "-c", f"""printf '{{"sizes": [5]}}\n"id"\n' > {folder}/jobs/1.json""")
    result = json.dumps(dataclasses.asdict(node.JobResult(0, "n", "1", 0, 0.0, 1.0)))
    as_neighbour("sh", "-c", f"echo '{result}' > {folder}/results/1-0.json")

    with pytest.raises(SystemExit, match="belongs to user"):
        node.main(folder, "1")
    assert node.read_result(folder / "results" / "1-0.json") is None


def test_a_journal_that_others_can_write_is_refused_and_a_neighbours_is_his_business(
    shared: Path,
) -> None:
    with closing(journal.JobJournal(shared)) as mine:
        own = mine.folder / "journal.jsonl"
    theirs = shared / "20260101-000000-deadbeef"
    as_neighbour("mkdir", theirs)
    as_neighbour("sh", "-c", f"echo nonsense > {theirs}/journal.jsonl")
    assert [run.name for run in journal.open_runs(shared, WorkingFolder.here())] == [
        own.parent.name
    ]
    own.chmod(0o660)

    with pytest.raises(journal.JournalError, match=f"chmod go-w {own}"):
        journal.open_runs(shared, WorkingFolder.here())


def test_a_link_in_the_place_of_an_executors_file_is_replaced(shared: Path, profile: Path) -> None:
    as_neighbour("ln", "-s", profile, shared / ".1.json")

    node.write_batch(shared / ".1.json", ["true"], node.BatchWork())

    assert profile.read_text() == "precious"
    assert (shared / ".1.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(private.UntrustedFileError, match="can be written by others"):
        private.append(shared / ".1.json")
