"""What runs on the node: the command's own end leaves a result, Slurm's signal leaves none."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit.node import BatchWork, JobResult, read_result, write_batch

# Slurm's job has no command in its own command line either.
RUN = """
import os, sys
from pathlib import Path
from snakemake_executor_plugin_submitit.node import BatchWork, run_job
run_job(os.environ.pop("COMMAND"), BatchWork(), Path(sys.argv[1]))
"""
# A Snakefile's own view of all processes, and of its config.
LISTS_COMMAND_LINES = """
from pathlib import Path

def read(path):
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""

rule all:
    output: "seen", "told"
    run:
        Path(output[0]).write_text("\\n".join(map(read, Path("/proc").glob("[0-9]*/cmdline"))))
        Path(output[1]).write_text(config["token"])
"""


def start(command: str, result: Path, *, umask: int = -1) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
        "SNAKEMAKE_PROFILE": "other",
        "COMMAND": command,
    }
    return subprocess.Popen([sys.executable, "-c", RUN, result], env=environment, umask=umask)


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "code"), [("true", 0), ("exit 3", 3), ("kill -9 $$", 128 + signal.SIGKILL)]
)
def test_the_commands_end_is_written_and_passed_on(tmp_path: Path, command: str, code: int) -> None:
    path = tmp_path / "result.json"

    returned = start(command, path).wait()

    result = read_result(path)
    assert returned == code
    assert result is not None
    assert (result.exit_code, result.slurm_job, result.restart) == (code, "7", 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_no_result_is_written_after_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = f"trap 'touch {tmp_path}/told; exit 1' TERM; touch {tmp_path}/up; sleep 60 & wait"
    job = start(command, path)
    wait_for_file(tmp_path / "up")

    job.terminate()

    assert job.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "told").exists()
    assert not path.exists()


def test_no_result_is_written_when_the_child_dies_before_our_own_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    job = start(f"touch {tmp_path}/down; exit 1", path)
    wait_for_file(tmp_path / "down")

    job.terminate()

    assert job.wait(60) == 128 + signal.SIGTERM
    assert not path.exists()


def test_a_success_before_a_requeue_is_not_repeated(tmp_path: Path) -> None:
    path, again = tmp_path / "result.json", tmp_path / "again"
    start("true", path).wait()
    before = path.read_text()

    returned = start(f"touch {again}", path).wait()

    assert returned == 0
    assert path.read_text() == before
    assert not again.exists()


def test_an_interrupted_attempts_failure_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    start("exit 3", path).wait()

    start("true", path).wait()

    result = read_result(path)
    assert result is not None
    assert result.exit_code == 0


def test_a_profile_of_the_submitting_shell_does_not_reach_the_command(tmp_path: Path) -> None:
    returned = start('test -z "$SNAKEMAKE_PROFILE"', tmp_path / "result.json").wait()

    assert returned == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"exit_code": 0}', "null"])
def test_half_a_result_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)

    found: JobResult | None = read_result(path)

    assert found is None
    assert read_result(tmp_path / "missing.json") is None


def test_a_result_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    old = '{"exit_code": 1, "host": "n1", "slurm_job": "7", "restart": 0, "started": 1, "ended": 2}'
    path.write_text(old)

    found = read_result(path)

    assert found is not None
    assert found.note == ""


def test_nothing_of_the_command_is_in_a_list_of_processes(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(LISTS_COMMAND_LINES)
    secret = "token=hunter2 it's"
    command = f"{sys.executable} -m snakemake --cores 1 --force-use-threads"
    command += f" --snakefile {tmp_path}/Snakefile --directory {tmp_path}"
    command += f" --config {shlex.quote(secret)}"

    returned = start(command, tmp_path / "result.json").wait(60)

    seen = (tmp_path / "seen").read_text()
    assert returned == 0
    assert (tmp_path / "told").read_text() == "hunter2 it's"
    assert "child.py" in seen
    assert "hunter2" not in seen


@pytest.mark.parametrize(
    "command",
    [
        "export A=hunter2 && [ $A = hunter2 ] && {list}",
        "A='hunter2'; {list}",
        "python -m snakemake hunter2 --version >/dev/null; {list}",
    ],
    ids=["exported", "assigned", "argument"],  # a worker of pytest-xdist has them in its own title
)
def test_a_shell_command_is_in_no_list_of_processes(tmp_path: Path, command: str) -> None:
    list_all = f"cat /proc/[0-9]*/cmdline > {tmp_path}/seen 2>/dev/null; true"

    returned = start(command.replace("{list}", list_all), tmp_path / "result.json").wait(60)

    seen = (tmp_path / "seen").read_bytes()
    assert returned == 0
    assert b"/bin/sh\0/dev/fd/" in seen
    assert b"hunter2" not in seen


def test_the_result_is_private_and_the_commands_files_are_as_the_umask_says(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"

    start(f"touch {tmp_path}/output", path, umask=0o027).wait(60)

    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "output").stat().st_mode & 0o777 == 0o640


# --- the jobs of a batch


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, with a batch of three jobs."""
    folder = tmp_path / "run"
    for name in ("jobs", "results"):
        (folder / name).mkdir(parents=True)
    told = '"$SBATCH_ACCOUNT $SLURM_NTASKS"'
    commands = [f"printf '%s ' 'é 世 {index}' {told} > {tmp_path}/{index}" for index in range(3)]
    given = {"SBATCH_ACCOUNT": "lab", "SLURM_NTASKS": "8"}
    write_batch(folder / "jobs" / "1.json", commands, BatchWork(environment=given))
    return folder


def run_main(folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "snakemake_executor_plugin_submitit.node", folder, "1"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_job_of_a_batch_runs_its_own_command_with_the_users_variables(
    tmp_path: Path, run: Path
) -> None:
    ends = [run_main(run, SLURM_ARRAY_TASK_ID=index, SLURM_NTASKS="2") for index in ("2", "1")]
    single = run_main(run)

    assert [end.returncode for end in (*ends, single)] == [0, 0, 0]
    assert (tmp_path / "2").read_text() == "é 世 2 lab 2 "
    assert (tmp_path / "1").read_text() == "é 世 1 lab 2 "
    assert (tmp_path / "0").read_text() == "é 世 0 lab 8 "
    assert len(list((run / "results").iterdir())) == 3


def test_a_job_that_had_ended_runs_nothing_and_writes_no_result(tmp_path: Path, run: Path) -> None:
    (run / "jobs" / "1-1.ended").touch()

    end = run_main(run, SLURM_ARRAY_TASK_ID="1")

    assert end.returncode == 0
    assert "nothing to run" in end.stdout
    assert not (tmp_path / "1").exists()
    assert list((run / "results").iterdir()) == []


def test_a_batch_is_the_users_own_business(run: Path) -> None:
    assert (run / "jobs" / "1.json").stat().st_mode & 0o777 == 0o600
