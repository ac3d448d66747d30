"""A persistent server as a Slurm job of its own, with a stand-in engine."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import shakedown

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ENGINE = Path(__file__).parents[1] / "faults" / "fake_engine.py"


@pytest.fixture
def folder(tmp_path: Path, slurm_env: dict[str, str]) -> Iterator[Path]:
    root = tmp_path / "policy"
    yield root
    if root.is_dir():
        shakedown("serve", "stop", root, env=slurm_env)


def start(
    env: dict[str, str], folder: Path, *more: object, mode: str = "good"
) -> subprocess.CompletedProcess[str]:
    start = ("serve", "start", "--launcher", "slurm", "--out", folder)
    return shakedown(*start, *served(mode), *more, env=env)


def served(mode: str = "good") -> list[str]:
    engine = ["--engine", "vllm", "--model", "hub/model"]
    return [*engine, "--prefix", f"{sys.executable} {ENGINE} {mode}"]


def queue(env: dict[str, str], job: str) -> str:
    """The job's state; empty when it is over."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    return done.stdout.strip()


def until(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.2)
    return condition()


def endpoint(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "endpoint.json").read_text())
    return body


def test_server_is_a_job_of_its_own_until_it_is_stopped(
    slurm_env: dict[str, str], folder: Path
) -> None:
    # As inside another job: the server must not become a part of it.
    inside = {**slurm_env, "SLURM_JOB_ID": "999999", "SLURM_NTASKS": "7"}

    started = start(inside, folder)

    assert started.returncode == 0, started.stderr
    found = endpoint(folder)
    job = found["launcher"]["job_id"]
    assert queue(slurm_env, job) == "RUNNING"
    assert found["node"].startswith("n")
    assert shakedown("serve", "status", folder, env=slurm_env).returncode == 0
    assert shakedown("serve", "stop", folder, env=slurm_env).returncode == 0
    assert until(lambda: queue(slurm_env, job) in ("", "COMPLETED"))
    assert shakedown("serve", "status", folder, env=slurm_env).returncode == 1


def test_time_in_the_queue_does_not_count_as_starting(
    slurm_env: dict[str, str], folder: Path
) -> None:
    started = start(slurm_env, folder, "--sbatch-args=--begin=now+15", "--ready-timeout", 5)

    assert started.returncode == 0, started.stdout + started.stderr
    assert "is PENDING (BeginTime)" in started.stdout


def test_cancelled_server_is_seen_and_submitted_again(
    slurm_env: dict[str, str], folder: Path
) -> None:
    start(slurm_env, folder)
    first = endpoint(folder)["launcher"]["job_id"]
    subprocess.run(["scancel", first], check=True, env=slurm_env)
    assert until(lambda: shakedown("serve", "status", folder, env=slurm_env).returncode == 1)

    ensured = shakedown("serve", "ensure", folder, *served(), env=slurm_env)

    assert ensured.returncode == 0, ensured.stderr
    second = endpoint(folder)["launcher"]["job_id"]
    assert second != first
    assert queue(slurm_env, second) == "RUNNING"


def test_lease_that_runs_out_ends_the_job(slurm_env: dict[str, str], folder: Path) -> None:
    start(slurm_env, folder, "--lease", 2)
    job = endpoint(folder)["launcher"]["job_id"]

    assert until(lambda: queue(slurm_env, job) in ("", "COMPLETED"))


def test_engine_that_fails_on_its_node_is_reported_here(
    slurm_env: dict[str, str], folder: Path
) -> None:
    started = start(slurm_env, folder, mode="crash")

    assert started.returncode == 3
    assert "likely cause: out of memory" in started.stdout
    assert not (folder / "endpoint.json").exists()


def test_job_that_slurm_refuses_is_told_in_its_words(
    slurm_env: dict[str, str], folder: Path
) -> None:
    started = start(slurm_env, folder, "--partition", "nowhere")

    assert started.returncode == 3
    assert "invalid partition" in started.stdout.lower()


def test_waiting_job_is_cancelled_by_stop(slurm_env: dict[str, str], folder: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-m", "shakedown.cli", "serve", "start", "--launcher", "slurm"]
        + ["--engine", "vllm", "--model", "hub/model", "--out", str(folder)]
        + ["--sbatch-args=--begin=now+3600"],
        stdout=subprocess.DEVNULL,
        env=slurm_env,
    )
    try:
        assert until((folder / "job").exists)
        job = (folder / "job").read_text().strip()
    finally:
        starter.kill()
        starter.wait()
    assert queue(slurm_env, job) == "PENDING"

    stopped = shakedown("serve", "stop", folder, env=slurm_env)

    assert stopped.returncode == 0, stopped.stderr
    assert until(lambda: queue(slurm_env, job) in ("", "CANCELLED"))
