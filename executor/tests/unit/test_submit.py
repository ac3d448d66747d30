"""One sbatch: what it is given, whose id is heard, and when a job finds its files."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from slurm_programs import Programs

from snakemake_executor_plugin_submitit.node import read_job
from snakemake_executor_plugin_submitit.slurm import SlurmError
from snakemake_executor_plugin_submitit.submit import (
    Batch,
    is_array_too_large,
    is_queue_full,
    submit,
)

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


def sbatch_of(programs: Programs, folder: Path, sent: Batch) -> tuple[str, str]:
    """The script and the arguments that sbatch is given for a batch."""
    copy = folder / "copy.sh"
    sbatch = folder / "bin" / "sbatch"
    programs.answer("sbatch", "12\n")
    keep = f'for last; do :; done; /bin/cp "$last" {shlex.quote(str(copy))}'
    sbatch.write_text(sbatch.read_text().replace("/bin/cat", f"{keep}; /bin/cat", 1))
    submit(sent)
    return copy.read_text(), programs.calls[-1]


def options(script: str) -> dict[str, str]:
    lines = (line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


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


def test_jobs_find_their_batch_and_what_sbatch_did_not_see_and_the_script_is_gone(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.answer("sbatch", "12\n")
    sbatch = tmp_path / "bin" / "sbatch"
    seen = shlex.quote(str(tmp_path / "seen"))
    sbatch.write_text(sbatch.read_text().replace("/bin/cat", f"/usr/bin/env > {seen}; /bin/cat", 1))
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")

    submit(batch(tmp_path, "make a", "make é 世"))

    command, work = read_job(tmp_path / "jobs" / "7.json", 1)
    assert (command, work.requeue_limit, work.signal) == ("make é 世", 2, "")
    assert work.environment["SBATCH_ACCOUNT"] == "lab"
    assert "SLURM_CONF" not in work.environment
    assert "SBATCH_ACCOUNT" not in (tmp_path / "seen").read_text()
    assert "SLURM_CONF=/etc/slurm.conf\n" in (tmp_path / "seen").read_text()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["7.json"]
    assert not list(tmp_path.glob("*.sh"))


def test_a_refused_batch_leaves_no_files(tmp_path: Path, programs: Programs) -> None:
    programs.answer("sbatch", error="sbatch: error: invalid partition specified: moon")

    with pytest.raises(SlurmError, match="moon"):
        submit(batch(tmp_path, "a", "b"))

    assert list((tmp_path / "jobs").iterdir()) == []


def test_the_script_asks_for_what_was_given_and_the_executors_own(
    tmp_path: Path, programs: Programs
) -> None:
    warned = {"signal": "B:USR1@60"}
    sent = batch(tmp_path, "secret a", "secret b", mem="1M", additional_parameters=warned)

    script, _ = sbatch_of(programs, tmp_path, sent)

    given = options(script)
    assert (given["mem"], given["job-name"], given["comment"]) == ("1M", NAME, "train")
    assert given["array"] == "0-1%2"
    assert given["output"].endswith("/logs/7-%a.log")
    assert given["signal"] == "B:USR1@60"
    assert "requeue" in given
    assert "trap '' USR1" in script
    assert "secret" not in script
    assert read_job(tmp_path / "jobs" / "7.json", 0)[1].signal == "USR1"


def test_every_option_is_an_argument_too_and_the_users_own_are_the_last(
    tmp_path: Path, programs: Programs
) -> None:
    """Variables and a script's own lines are outranked by arguments alone."""
    sent = batch(tmp_path, "a", mem="1M", constraint="a&b c", extra=["--hold", "--nice=a b"])

    script, call = sbatch_of(programs, tmp_path, sent)

    given = [shlex.split(line)[1] for line in script.splitlines() if "#SBATCH" in line]
    assert "--constraint=a&b c" in given
    assert call == f"sbatch --parsable {' '.join(given)} --hold --nice=a b {tmp_path}/7.sh"


def test_an_option_that_is_too_long_for_an_argument_stands_in_the_script(
    tmp_path: Path, programs: Programs
) -> None:
    nodes = {length: "n" * (length - len("--exclude=")) for length in (128 * 1024 - 1, 128 * 1024)}

    calls = {
        length: sbatch_of(programs, tmp_path, batch(tmp_path, "a", exclude=names))
        for length, names in nodes.items()
    }

    assert all(options(script)["exclude"] == nodes[length] for length, (script, _) in calls.items())
    assert ["--exclude" in call for _, call in calls.values()] == [True, False]


@pytest.mark.parametrize(("given", "nodes"), [({}, None), ({"nodes": 2}, "2"), ({"nodes": 1}, "1")])
def test_the_number_of_nodes_is_slurms_where_nobody_asks(
    tmp_path: Path, programs: Programs, given: dict[str, Any], nodes: str | None
) -> None:
    script, call = sbatch_of(programs, tmp_path, batch(tmp_path, "a", **given))

    assert options(script).get("nodes") == nodes
    assert ("--nodes" in call) == (nodes is not None)


@pytest.mark.parametrize(
    ("words", "is_full", "is_too_large"),
    [
        ("Batch job submission failed: Invalid job array specification", False, True),
        ("sbatch: error: AssocMaxSubmitJobLimit", True, False),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", True, False),
        ("Job violates accounting/QOS policy (job submit limit, user's size)", True, False),
        ("Resource temporarily unavailable", True, False),
        ("Slurm temporarily unable to accept job, sleeping and retrying", True, False),
        ("sbatch: error: QOSMaxCpuPerJobLimit", False, False),
        ("Invalid partition name specified", False, False),
        ("Socket timed out on send/recv operation", False, False),
    ],
)
def test_a_full_queue_is_told_from_an_array_that_is_too_large(
    words: str, is_full: bool, is_too_large: bool
) -> None:
    assert (is_queue_full(words), is_array_too_large(words)) == (is_full, is_too_large)
