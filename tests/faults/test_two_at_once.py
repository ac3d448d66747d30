"""Two commands that write the same place at the same moment: one is refused, or all is whole."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shakedown.core.outcome import Outcome
from shakedown.core.paths import RunPaths
from shakedown.core.verdict import read_verdict
from tests.command import shakedown

pytestmark = pytest.mark.slow

ROUNDS = 3
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "shakedown.cli", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        begun.append(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]
        return begun[-1]

    yield run
    for each in begun:
        each.kill()
        each.communicate()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_second_preflight_is_refused_and_a_killed_ones_folder_is_taken_over(
    begin: Begin, tmp_path: Path
) -> None:
    first = begin("preflight", "--out", tmp_path, "--fake-fault", "probe_hang", "--timeout", 30)
    until(lambda: (tmp_path / ".lease" / "1").exists() and (tmp_path / "nodes").is_dir())

    second = shakedown("preflight", "--out", tmp_path)

    assert second.returncode == 2
    assert f"is in use: shakedown preflight (pid {first.pid} on " in second.stderr
    assert not (tmp_path / "verdict.json").exists()
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    third = shakedown("preflight", "--out", tmp_path)
    assert third.returncode in (0, 1)  # of this machine's disk and limits
    assert read_verdict(tmp_path / "verdict.json").stage == "preflight"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunPaths:
    """A run whose only stage failed."""
    run = RunPaths(tmp_path / "run")
    stage = run.stage("sft")
    attempt = stage.new_attempt()
    Outcome("sft", 1, "failed", "trainer-rank0 ended with exit code 1").write(attempt.outcome)
    shutil.copy(attempt.outcome, stage.outcome)
    attempt.log("trainer-rank0").write_text("ValueError: x\n" * 20_000)
    run.config.write_text("run: run\n")
    return run


def test_a_diagnosis_a_gate_and_a_report_made_twice_at_once_are_whole(
    begin: Begin, run_dir: RunPaths, tmp_path: Path
) -> None:
    stage = run_dir.stage("sft")
    gate = ["accept", stage.outcome, "--diagnosis", stage.diagnosis, "--remove-on-fail"]
    commands = [
        ["hang", "diagnose", "--stage", stage.root],
        [*gate, tmp_path / "gone"],
        ["report", run_dir.root],
        ["hang", "collect", "--pid", os.getpid(), "--rounds", 1, "--out", tmp_path / "evidence"],
    ]
    expected = [shakedown(*command).returncode for command in commands]
    for _ in range(ROUNDS):
        (tmp_path / "gone").touch()
        twice = [begin(*command) for command in commands for _ in range(2)]
        while any(each.poll() is None for each in twice):
            whole(tmp_path)
        assert [each.returncode for each in twice] == [c for c in expected for _ in range(2)]
        assert not (tmp_path / "gone").exists()
    made = (stage.diagnosis, stage.latest / "diagnosis.json", stage.diagnosis_html, run_dir.report)
    assert all(path.is_file() for path in made)
    assert list((tmp_path / "evidence").glob("collected-*.json"))
    assert not [path for path in tmp_path.rglob(".*.tmp-*") if path.exists()]


def whole(folder: Path) -> int:
    """How many files there are; each is read to its end."""
    files = [*folder.rglob("*.json"), *folder.rglob("*.html")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert text.endswith("\n") or text.rstrip().endswith("</html>"), path
        if path.suffix == ".json":
            json.loads(text)
    return len(files)
