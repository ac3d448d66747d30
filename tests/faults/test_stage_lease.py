"""Two terminals and one stage folder: one trains; what a killed one left ends before the next."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import StagePaths
from shakedown.processes.guard import look
from tests.faults.command_stage import Start, finish, rows, wait_for_step
from tests.workflow.helpers import processes_that_mention, read_json

pytestmark = pytest.mark.slow

# A trainer that is deaf to SIGTERM, and ends once its folder has a file `end`.
TRAINER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
step, folder = 0, sys.argv[1]
while not os.path.exists(f"{folder}/end"):
    step += 1
    print(f"step {step} pid {os.getpid()}", flush=True)
    time.sleep(0.2)
"""


@pytest.fixture
def train(start: Start, stage: StagePaths, tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    keys: dict[str, Any] = {
        "algorithm": "command",
        "launch": "none",
        "command": f"{sys.executable} {script} {{stage}}",
        "progress": {"pattern": r"step (?P<step>\d+)"},
    }
    yield lambda: start(**keys)
    stage.root.joinpath("end").touch()


def trainers(tmp_path: Path) -> list[int]:
    found = processes_that_mention(f"{tmp_path / 'trainer.py'}")
    return [int(line.partition(" ")[0]) for line in found]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def guard_of(supervisor: int) -> int:
    lines = processes_that_mention("guard.py")
    pids = [int(line.partition(" ")[0]) for line in lines]
    (found,) = [pid for pid in pids if (p := look(pid)) is not None and p.parent == supervisor]
    return found


def test_a_second_terminal_is_refused_and_the_stage_goes_on_alone(
    train: Start, stage: StagePaths
) -> None:
    first = train()
    wait_for_step(stage, 3)

    second = train()
    said = finish(second)

    assert second.returncode == 2
    assert f"is in use: shakedown train lab (pid {first.pid} on " in said
    wait_for_step(stage, rows(stage)[-1]["step"] + 3)
    (stage.root / "end").touch()
    finish(first)
    steps = [row["step"] for row in rows(stage)]
    assert (first.returncode, read_json(stage.outcome)["state"]) == (0, "completed")
    assert steps == list(range(1, len(steps) + 1))
    assert os.listdir(stage.attempts) == ["001"]
    assert not (stage.latest / "roster.json").exists()


@pytest.mark.parametrize("guard_too", [False, True])
def test_what_outlives_a_killed_supervisor_is_gone_before_the_next_one_trains(
    train: Start, stage: StagePaths, tmp_path: Path, guard_too: bool
) -> None:
    first = train()
    wait_for_step(stage, 3)
    left = trainers(tmp_path)
    killed = [guard_of(first.pid), first.pid] if guard_too else [first.pid]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    first.wait(60)
    assert set(left) <= set(trainers(tmp_path))  # it is deaf to the guard's SIGTERM

    second = train()
    until(lambda: list(stage.root.glob("attempts/002/heartbeat")) and trainers(tmp_path))

    until(lambda: set(trainers(tmp_path)).isdisjoint(left) and trainers(tmp_path))
    (stage.root / "end").touch()
    finish(second)
    finish(first)  # whose pipe its guard held, too
    log = (stage.latest / "logs" / "trainer-launch.log").read_text()
    assert second.returncode == 0
    assert not any(f"pid {pid}" in log for pid in left)
    assert (stage.latest / "fence").read_text() == "2\n"
