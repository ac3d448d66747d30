"""One sbatch: what it is given, whose id is heard, and when a job finds its files."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.node import JobFile
from snakemake_executor_plugin_submitit.slurm import SlurmError
from snakemake_executor_plugin_submitit.submit import Batch, submit

NAME = "train-a1b2c3d4.7"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = Programs(folder, monkeypatch)
    programs.answer("srun")  # submitit's sign of a Slurm cluster
    programs.answer("squeue")
    return programs


def batch(folder: Path, *commands: str, **parameters: Any) -> Batch:
    for name in ("jobs", "logs"):
        (folder / name).mkdir(exist_ok=True)
    return Batch(7, NAME, "train", parameters, commands, folder, requeue_limit=2)


def script(programs: Programs, folder: Path) -> dict[str, str]:
    """What sbatch is given, by option; it leaves a copy of its script."""
    copy = folder / "copy.sh"
    sbatch = folder / "bin" / "sbatch"
    programs.answer("sbatch", "12\n")
    text = sbatch.read_text().replace(
        "/bin/cat", f"/bin/cp $2 {shlex.quote(str(copy))}; /bin/cat", 1
    )
    sbatch.write_text(text)
    submit(batch(folder, "a", "b", mem="1M", additional_parameters={"signal": "B:USR1@60"}))
    lines = copy.read_text().splitlines()
    options = (line.removeprefix("#SBATCH --").partition("=") for line in lines if "--" in line)
    return {"text": copy.read_text(), **{name: value for name, _, value in options}}


@pytest.mark.parametrize(
    ("words", "ids", "cluster"),
    [
        ("12\n", ["12_0", "12_1"], ""),
        ("12;east\n", ["12_0", "12_1"], "east"),
        ("Note: job 42\n12\nthank you for 100 % of your trust\n", ["12_0", "12_1"], ""),
    ],
)
def test_the_id_is_what_parsable_prints_alone_on_a_line(
    tmp_path: Path, programs: Programs, words: str, ids: list[str], cluster: str
) -> None:
    programs.answer("sbatch", words)

    submitted = submit(batch(tmp_path, "a", "b"))

    assert (submitted.job_ids, submitted.cluster) == (ids, cluster)


@pytest.mark.parametrize("words", ["Submitted batch job 42\n", "", "41\n42\n"])
def test_where_the_words_have_no_id_the_queue_is_asked_by_name(
    tmp_path: Path, programs: Programs, words: str
) -> None:
    programs.answer("sbatch", words)
    programs.answer("squeue", f"41|PENDING|None||N/A|other\n12_0|PENDING|None||N/A|{NAME}\n")

    assert submit(batch(tmp_path, "a", "b")).job_ids == ["12_0", "12_1"]


def test_no_id_anywhere_is_an_error_and_the_jobs_find_no_files(
    tmp_path: Path, programs: Programs
) -> None:
    programs.answer("sbatch", "Submitted batch job 42\n")

    with pytest.raises(SlurmError, match="Submitted batch job 42"):
        submit(batch(tmp_path, "a"))

    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_job_finds_its_file_by_batch_and_index_and_the_script_is_gone(
    tmp_path: Path, programs: Programs
) -> None:
    programs.answer("sbatch", "12\n")

    submit(batch(tmp_path, "make a", "make b"))

    assert JobFile.read(tmp_path / "jobs" / "7-1.json") == JobFile("make b", 2)
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == ["7-0.json", "7-1.json"]
    assert not list(tmp_path.glob("*.sh"))


def test_a_refused_batch_leaves_no_files(tmp_path: Path, programs: Programs) -> None:
    programs.answer("sbatch", error="sbatch: error: invalid partition specified: moon")

    with pytest.raises(SlurmError, match="moon"):
        submit(batch(tmp_path, "a", "b"))

    assert list((tmp_path / "jobs").iterdir()) == []


def test_the_script_asks_for_what_was_given_and_the_executors_own(
    tmp_path: Path, programs: Programs
) -> None:
    given = script(programs, tmp_path)

    assert (given["mem"], given["job-name"], given["comment"]) == ("1M", NAME, "train")
    assert given["array"] == "0-1%2"
    assert given["output"].endswith("/logs/7-%a.log")
    assert given["signal"] == "B:USR1@60"
    assert "requeue" in given
    assert "trap '' USR1" in given["text"]
    assert "secret" not in given["text"]
