"""Slurm's warning on the node: who hears it, and the job's way back into the queue."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from snakemake_executor_plugin_submitit import checkpoint
from snakemake_executor_plugin_submitit.node import read_result

RUN = """
import sys
from pathlib import Path
from snakemake_executor_plugin_submitit.node import BatchWork, run_job
run_job(sys.argv[1], BatchWork(int(sys.argv[3]), "USR2"), Path(sys.argv[2]))
"""
# Saves and leaves on the warning, as a stage of a training does.
SAVES = "trap 'echo saved > saved; exit 75' USR2; touch up; while :; do sleep 0.1; done"
Popen = subprocess.Popen[str]
Start = Callable[..., Popen]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Run a command as on a node of array task 7_3; `scontrol`: what this program does there."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, *, scontrol: str = "", limit: int = 2, **more: str) -> Popen:
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> calls\n{scontrol}\n')
        (programs / "scontrol").chmod(0o755)
        own = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
        return subprocess.Popen(
            [sys.executable, "-c", RUN, command, "result.json", str(limit)],
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **own, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


def wait_for_file(path: Path, lines: int = 0) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.05)


def end(job: Popen) -> tuple[int, str]:
    output, _ = job.communicate(timeout=60)
    return job.returncode, output


def test_a_warned_job_that_saved_is_requeued_and_waits_without_a_result(
    tmp_path: Path, start: Start
) -> None:
    job = start(SAVES)
    wait_for_file(tmp_path / "up")

    job.send_signal(signal.SIGUSR2)
    wait_for_file(tmp_path / "calls", lines=1)
    job.terminate()  # what Slurm does to a requeued job

    code, output = end(job)
    assert code == 128 + signal.SIGTERM, output
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "calls").read_text() == "requeue 7_3\n"
    assert not (tmp_path / "result.json").exists()


def test_a_controller_that_is_down_is_asked_again(tmp_path: Path, start: Start) -> None:
    down = "scontrol: error: Unable to contact slurm controller (connect failure)"
    job = start(SAVES, scontrol=f"[ $(wc -l < calls) = 2 ] || {{ echo '{down}' >&2; exit 1; }}")
    wait_for_file(tmp_path / "up")

    job.send_signal(signal.SIGUSR2)
    wait_for_file(tmp_path / "calls", lines=2)
    job.terminate()

    code, output = end(job)
    assert code == 128 + signal.SIGTERM
    assert f"requeue: scontrol: {down}; trying again in 2 s" in output
    assert "requeued after Slurm's warning, 1 of 2 times" in output


def test_a_requeue_that_slurm_refuses_is_noted_in_the_result(tmp_path: Path, start: Start) -> None:
    job = start(SAVES, scontrol="echo 'Requested operation is presently disabled' >&2; exit 1")
    wait_for_file(tmp_path / "up")

    job.send_signal(signal.SIGUSR2)

    code, _ = end(job)
    result = read_result(tmp_path / "result.json")
    assert code == 75
    assert result is not None
    assert result.exit_code == 75
    assert "Requested operation is presently disabled" in result.note


@pytest.mark.parametrize(
    ("limit", "restarts", "note"), [(2, "2", "requeued 2 times, the limit"), (0, "", "")]
)
def test_at_the_limit_the_commands_end_is_the_result(
    tmp_path: Path, start: Start, limit: int, restarts: str, note: str
) -> None:
    counted = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    job = start(SAVES, limit=limit, **counted)
    wait_for_file(tmp_path / "up")

    job.send_signal(signal.SIGUSR2)

    code, _ = end(job)
    result = read_result(tmp_path / "result.json")
    assert code == 75
    assert result is not None
    assert (result.exit_code, result.note) == (75, note)
    assert not (tmp_path / "calls").exists()


def test_a_success_after_the_warning_is_a_success(tmp_path: Path, start: Start) -> None:
    job = start("touch up; while [ ! -e done ]; do sleep 0.1; done")
    wait_for_file(tmp_path / "up")

    job.send_signal(signal.SIGUSR2)
    (tmp_path / "done").touch()

    code, _ = end(job)
    result = read_result(tmp_path / "result.json")
    assert code == 0
    assert result is not None
    assert (result.exit_code, result.note) == (0, "")


def test_a_handler_that_is_installed_after_the_warning_is_reached(
    tmp_path: Path, start: Start
) -> None:
    job = start(f"touch early; while [ ! -e later ]; do sleep 0.1; done; {SAVES}")
    wait_for_file(tmp_path / "early")

    job.send_signal(signal.SIGUSR2)
    (tmp_path / "later").touch()
    wait_for_file(tmp_path / "calls", lines=1)
    job.terminate()

    code, output = end(job)
    assert code == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert output.count("Slurm's warning before the end goes to process") == 1


def test_a_stopped_job_waits_for_processes_that_outlive_their_shell(
    tmp_path: Path, start: Start
) -> None:
    saves = "trap 'sleep 1; touch saved; exit' TERM; touch up; while :; do sleep 0.1; done"
    (tmp_path / "saves").write_text(saves)
    job = start("sh saves & wait")
    wait_for_file(tmp_path / "up")

    job.terminate()

    code, _ = end(job)
    assert code == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("handler", "expected"), [("signal.SIG_DFL", False), ("lambda *_: None", True)]
)
def test_a_handler_is_seen_from_outside(handler: str, expected: bool) -> None:
    code = f"import signal; signal.signal(signal.SIGUSR2, {handler}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()

        found = checkpoint.catches(process.pid, signal.SIGUSR2)

        process.communicate(b"\n")
    assert found == expected
    assert not checkpoint.catches(process.pid, signal.SIGUSR2)


def test_descendants_are_all_generations_without_the_ended_ones() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sh -c 'sleep 60 & sleep 60 & echo; wait' & wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()

        below = checkpoint.descendants(shell.pid)

        os.killpg(shell.pid, signal.SIGKILL)
    assert len(below) == 3
    assert not checkpoint.descendants(shell.pid)


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "9"}, "9"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
    ],
)
def test_a_job_is_known_by_its_array_task(environ: dict[str, str], job: str) -> None:
    assert checkpoint.own_job(environ) == job
