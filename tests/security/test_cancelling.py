"""Which Slurm jobs are cancelled, whatever stands in a folder that others may write."""

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from entries import entry
from slurm_programs import Programs

from shakedown.core.errors import LaunchError, UntrustedError, UsageError
from shakedown.core.paths import ServerPaths
from shakedown.inference.server import stop
from shakedown.slurm import jobs
from snakemake_executor_plugin_submitit import slurm
from snakemake_executor_plugin_submitit.identity import WorkingFolder
from snakemake_executor_plugin_submitit.journal import (
    JobJournal,
    JournalError,
    is_name_of,
    name_ending,
    open_runs,
)

MARK = "0123456789abcdef"
OURS = f"shakedown-{MARK}"
NOBODY = 65534
NO_IDS = ["--user=root", "-t", "7,8", "7 8", "7\n8", "*", "-1", "7_[0-3]", "(null)"]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """`squeue` and `scancel` that answer as a test says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = Programs(folder, monkeypatch)
    programs.answer("squeue")
    programs.answer("scancel")
    return programs


def row(*, owner: int | None = None, comment: str = "(null)", name: str = "(null)") -> str:
    """squeue's line about a waiting job."""
    uid = os.getuid() if owner is None else owner
    return f"7|PENDING|Resources||N/A|{uid}|{name}|{comment}\n"


# --- the server's job


@pytest.mark.parametrize(
    "line",
    [
        row(),
        row(comment="", name=""),
        row(comment="shakedown-", name="serve-policy-"),
        row(comment="project 7", name="train"),
        row(comment=OURS.upper(), name=f"serve-policy-{MARK}0"),
        row(owner=NOBODY, comment=OURS, name=f"serve-policy-{MARK}"),
    ],
)
def test_a_job_without_the_servers_mark_is_not_cancelled(programs: Programs, line: str) -> None:
    programs.answer("squeue", line)

    with pytest.raises(LaunchError, match="not the mark of"):
        jobs.cancel_marked("7", MARK)

    assert programs.called("scancel") == 0


@pytest.mark.parametrize("mark", ["", "(null)", "null", "0", MARK[:-1], f"{MARK}\n"])
@pytest.mark.parametrize("comment", ["", "(null)", "shakedown-", "shakedown-(null)"])
def test_what_is_no_mark_matches_no_job(programs: Programs, mark: str, comment: str) -> None:
    programs.answer("squeue", row(comment=comment, name=f"serve-policy-{mark}".strip()))

    with pytest.raises(LaunchError):
        jobs.cancel_marked("7", mark)

    assert programs.called("scancel") == 0


@pytest.mark.parametrize("line", [row(comment=OURS), row(name=f"serve-policy-{MARK}")])
def test_a_job_that_bears_the_mark_is_cancelled_by_its_number(
    programs: Programs, line: str
) -> None:
    programs.answer("squeue", line)

    jobs.cancel_marked("7", MARK)

    assert programs.calls[-1] == "scancel 7"


def test_a_silent_controller_is_no_leave_to_cancel(programs: Programs) -> None:
    programs.answer("squeue", error="Unable to contact slurm controller")

    with pytest.raises(LaunchError, match="Unable to contact"):
        jobs.cancel_marked("7", MARK)

    assert programs.called("scancel") == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can write."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own is closed
        path = Path(name)
        path.chmod(0o777)
        yield path


def plant(path: Path, text: str) -> None:
    """Write a file as another user, where this one may become one."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    script = f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))}"
    command = [*(drop if os.geteuid() == 0 else []), "sh", "-c", script]
    # The PATH of this process has nothing but stand-ins.
    subprocess.run(command, check=True, env={"PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("text", NO_IDS)
def test_a_job_file_that_holds_no_number_is_refused(
    programs: Programs, tmp_path: Path, text: str
) -> None:
    ServerPaths(tmp_path).job.write_text(text)

    with pytest.raises(UsageError, match="number of one Slurm job"):
        stop(tmp_path)

    assert programs.calls == []


@pytest.mark.parametrize("mark", ["", "(null)", MARK])
def test_the_number_of_another_job_of_mine_cancels_nothing(
    programs: Programs, tmp_path: Path, mark: str
) -> None:
    programs.answer("squeue", row(name="my-other-work"))
    ServerPaths(tmp_path).job.write_text("7")
    ServerPaths(tmp_path).job_mark.write_text(mark)

    assert stop(tmp_path) == "was not running"
    assert programs.called("scancel") == 0


def test_a_planted_number_of_a_job_cancels_nothing(programs: Programs, shared: Path) -> None:
    plant(ServerPaths(shared).job, "7")
    shared.chmod(0o755)

    with pytest.raises(UntrustedError, match=r"job belongs to nobody|job can be written"):
        stop(shared)

    assert programs.calls == []


# --- the executor's jobs


@pytest.mark.parametrize("job_id", ["", *NO_IDS])
def test_scancel_is_given_numbers_of_jobs_alone(programs: Programs, job_id: str) -> None:
    with pytest.raises(ValueError, match="not the id of one Slurm job"):
        slurm.cancel(["7", job_id])

    assert programs.calls == []


@pytest.mark.parametrize("run", ["", "run", "run-", "run-(null)", "run-a", "run-.*", "run-a1b2c3d"])
@pytest.mark.parametrize(
    "name", ["", "(null)", "-.1", "x-.1", "x-(null).1", "x-a.1", "x-a1b2c3d.1"]
)
def test_a_folder_without_a_mark_has_named_no_job(run: str, name: str) -> None:
    assert not is_name_of(run, name)


@pytest.fixture
def dead_run(tmp_path: Path) -> Path:
    """The journal of a run that was killed, with one job: its own."""
    with closing(JobJournal(tmp_path / "submitit")) as journal:
        own = f"train{name_ending(journal.run, 1)}"
        journal.jobs([entry("7", name=own, run=journal.run)])
    return journal.folder / "journal.jsonl"


def add(path: Path, event: dict[str, object]) -> None:
    with path.open("a") as stream:
        stream.write(f"\n{json.dumps(event)}\n")


@pytest.mark.parametrize("name", ["", "(null)", "my-other-work", "train-a1b2c3d4.1", "a,b"])
def test_a_forged_batch_of_a_journal_makes_nobody_cancel_by_its_name(
    dead_run: Path, name: str
) -> None:
    add(dead_run, {"event": "batch", "name": name, "cluster": ""})

    with pytest.raises(JournalError, match="job name"):
        open_runs(dead_run.parents[1], WorkingFolder.here())


@pytest.mark.parametrize("job_id", ["", *NO_IDS])
def test_a_forged_job_of_a_journal_makes_nobody_cancel_by_its_id(
    dead_run: Path, job_id: str
) -> None:
    run = dead_run.parent.name
    forged = entry(job_id, name=f"train{name_ending(run, 2)}", run=run)
    add(dead_run, {"event": "job", **asdict(forged)})

    with pytest.raises(JournalError, match="job id"):
        open_runs(dead_run.parents[1], WorkingFolder.here())


def test_a_forged_job_of_a_journal_makes_nobody_cancel_by_its_name(dead_run: Path) -> None:
    forged = entry("8", name="my-other-work", run=dead_run.parent.name)
    add(dead_run, {"event": "job", **asdict(forged)})

    with pytest.raises(JournalError, match="my-other-work"):
        open_runs(dead_run.parents[1], WorkingFolder.here())
