"""Real jobs that hang (gloo, FSDP2): watched, sampled and diagnosed as a supervisor would."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.outcome import Outcome
from shakedown.diagnosis.diagnose import diagnose_stage
from shakedown.monitor import hook
from shakedown.monitor.collect import CollectReport, Target, collect_local
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.progress.movement import Watch
from shakedown.progress.patience import Patience

JOB = Path(__file__).with_name("hang_job.py")
HUNG = Outcome("grpo", 1, "hung", "stalled")
pytestmark = pytest.mark.slow
of_gloo = pytest.mark.skipif(
    os.environ.get("TRAINER_DEVICE") == "cuda", reason="NCCL waits where gloo ends the process"
)


@dataclass
class Job:
    attempt: Path
    ranks: list[subprocess.Popen[bytes]]

    def targets(self) -> list[Target]:
        rows = enumerate(self.ranks)
        return [Target(f"trainer-rank{r}", p.pid, "trainer", r) for r, p in rows]

    def wait_until_stalled(self) -> str:
        """Follow the heartbeats until the watch has confirmed that the job stands still."""
        watch = Watch(Patience(step=3.0, phase=15.0))
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            movement = watch.observe(read_heartbeats(self.attempt / "heartbeat"), time.monotonic())
            if movement.state == "still":
                return movement.sentence
            time.sleep(0.5)
        raise AssertionError("the job never stalled")

    def collect(self) -> CollectReport:
        evidence = self.attempt / "evidence"
        return collect_local(self.targets(), evidence, logs=self.attempt / "logs", gap=1.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(fault: str, world: int, attempt: Path) -> Iterator[Job]:
    """Start the job's ranks; end exactly these processes afterwards."""
    logs = attempt / "logs"
    logs.mkdir(parents=True)
    port = free_port()
    job = Job(attempt, [])
    try:
        for rank in range(world):
            environment = {
                **os.environ,
                **hook.ENVIRONMENT,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            with (logs / f"trainer-rank{rank}.log").open("wb") as log:
                command = [sys.executable, str(JOB), fault, str(attempt)]
                process = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            job.ranks.append(process)
        yield job
    finally:
        for process in job.ranks:
            process.kill()
            process.wait()


def diagnose(job: Job) -> tuple[str, dict[str, Any]]:
    verdict = diagnose_stage(job.attempt, HUNG)
    return verdict.summary, dict(verdict.extra["diagnosis"])


@pytest.mark.parametrize(
    ("fault", "world", "line"),
    [
        pytest.param("conditional", 4, "log_extra", marks=pytest.mark.exhaustive),
        ("extra_call", 2, "same_call"),
    ],
)
def test_rank_that_calls_an_extra_collective_is_named_with_its_line(
    fault: str, world: int, line: str, tmp_path: Path
) -> None:
    with running(fault, world, tmp_path / "001") as job:
        job.wait_until_stalled()
        report = job.collect()
        assert not any(row.missed for row in report.targets)
    summary, diagnosis = diagnose(job)
    assert diagnosis["cause"] == "conditional_collective"
    assert diagnosis["culprits"]["ranks"] == [1]
    assert diagnosis["pattern"] == "B"
    assert diagnosis["state"] == "hung"
    text = JOB.read_text(encoding="utf-8").splitlines()
    called = next(n for n, row in enumerate(text, 1) if f"def {line}" in row) + 1
    assert f"hang_job.py:{called}" in summary


@pytest.mark.exhaustive
def test_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with running("asleep", 3, tmp_path / "001") as job:
        job.wait_until_stalled()
        job.collect()
    _, diagnosis = diagnose(job)
    assert (diagnosis["cause"], diagnosis["pattern"]) == ("missing_rank", None)
    assert diagnosis["culprits"]["ranks"] == [1]
    assert diagnosis["victims"]["ranks"] == [0, 2]


@pytest.mark.exhaustive
@of_gloo
def test_rank_that_raised_is_named_though_the_others_died_of_it(tmp_path: Path) -> None:
    with running("raises", 3, tmp_path / "001") as job:
        codes = {f"trainer-rank{r}": p.wait(timeout=120) for r, p in enumerate(job.ranks)}
    outcome = replace(HUNG, state="failed", exit_codes=codes, failed_component="trainer-rank1")
    verdict = diagnose_stage(job.attempt, outcome)
    diagnosis = verdict.extra["diagnosis"]
    assert diagnosis["state"] == "exited"
    assert diagnosis["cause"] == "user_code"
    assert diagnosis["culprits"]["ranks"] == [1]
    assert "loss is not finite" in verdict.summary


@pytest.mark.exhaustive
@of_gloo
def test_rank_whose_extra_call_makes_gloo_abort_is_named_by_the_dumps(tmp_path: Path) -> None:
    with running("mismatch", 2, tmp_path / "001") as job:
        codes = {f"trainer-rank{r}": p.wait(timeout=120) for r, p in enumerate(job.ranks)}
    outcome = replace(HUNG, state="failed", exit_codes=codes)
    verdict = diagnose_stage(job.attempt, outcome)
    diagnosis = verdict.extra["diagnosis"]
    assert diagnosis["cause"] == "conditional_collective"
    assert diagnosis["culprits"]["ranks"] == [1]
    assert "hang_job.py" in verdict.summary


def test_healthy_job_is_found_moving_by_two_samples(tmp_path: Path) -> None:
    with running("none", 2, tmp_path / "001") as job:
        while not (beats := read_heartbeats(job.attempt / "heartbeat")) or beats[-1].step < 3:
            time.sleep(0.2)
        for _ in range(5):  # a busy machine may let no step end between two samples
            job.collect()
            verdict = diagnose_stage(job.attempt, None)
            assert verdict.extra["diagnosis"]["state"] != "hung", verdict.summary
            if verdict.status == "PASS":
                break
    assert verdict.extra["diagnosis"]["state"] == "healthy", verdict.summary
    assert diagnose(job)[1]["cause"] == "slow_not_hung"


def test_collect_command_reads_an_attempt_and_analyze_names_the_rank(tmp_path: Path) -> None:
    attempt = tmp_path / "001"
    command = [sys.executable, "-m", "shakedown.cli", "hang"]
    with running("conditional", 2, attempt) as job:
        job.wait_until_stalled()
        collected = subprocess.run(
            [*command, "collect", "--attempt", str(attempt), "--out", str(attempt / "evidence")],
            capture_output=True,
            text=True,
            check=False,
        )
    assert collected.returncode == 0, collected.stderr
    analyzed = subprocess.run(
        [*command, "analyze", str(attempt), "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert analyzed.returncode == 1, analyzed.stderr
    assert json.loads(analyzed.stdout)["diagnosis"]["culprits"]["ranks"] == [1]
