"""Ray's actors that fail: the one that does is named by its rank or its process, and nobody else.

The driver (tests/data/trainers/policy_actors.py) knows nothing of shakedown.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import StagePaths
from tests.faults.command_stage import Start, diagnose, finish, rows, wait_for_step
from tests.trainer_pythons import RAY_PYTHON, needs_ray
from tests.trainer_stages import first_step_of_rerun
from tests.workflow.helpers import ROOT, read_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, needs_ray]

SCRIPT = ROOT / "tests" / "data" / "trainers" / "policy_actors.py"
STEPS = 60
STAGE: dict[str, Any] = {
    "algorithm": "command",
    "launch": "ray",
    "python": RAY_PYTHON,
    "command": f"python {SCRIPT} --steps {STEPS} --loop-on {{stage}}/loop --out {{stage}}/states",
    "steps": STEPS,
    "resume": {"glob": "{stage}/states/step_*.json", "arguments": "--resume {resume}"},
    "progress": {"pattern": r"step (?P<step>\d+)"},
    "stall_timeout": 8.0,
    "start_timeout": 240.0,
}


def pids(stage: StagePaths) -> list[int]:
    """Of the actors, in the order of their ranks."""
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    return [int(word) for word in log.splitlines()[-1].partition("pids=")[2].split()]


def roles_of(stage: StagePaths) -> dict[str, str]:
    """What the collector found, by name."""
    (table,) = stage.latest.glob("evidence/collected-*.json")
    return {target["name"]: target["role"] for target in read_json(table)["targets"]}


def status(stage: StagePaths) -> str:
    command = [sys.executable, "-m", "shakedown.cli", "status", str(stage.root.parents[1])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_stopped_actor_is_named_by_the_rank_that_it_was_told(
    start: Start, stage: StagePaths
) -> None:
    process = start(**STAGE)
    wait_for_step(stage, 3)
    shown = status(stage)
    stopped = pids(stage)[3]
    os.kill(stopped, signal.SIGSTOP)
    finish(process)

    assert "dashboard" in shown
    assert "ssh -L 8265:127.0.0.1:" in shown
    found = diagnose(stage)["diagnosis"]
    assert (found["state"], found["cause"]) == ("hung", "missing_rank")
    assert found["culprits"] == {"ranks": [3], "nodes": [], "roles": []}
    assert f"rank 3 is actor PolicyWorker, process {stopped}" in diagnose(stage)["summary"]
    names = roles_of(stage)
    assert {names[f"PolicyWorker-rank{rank}"] for rank in range(4)} == {"actor PolicyWorker"}
    assert "actor RewardWorker" in names.values()
    assert list(names.values()).count("driver") == 1
    (state,) = stage.latest.glob("evidence/*-ray.json")
    assert len(read_json(state)["clusters"][0]["actors"]) == 5


def test_an_actor_in_an_endless_loop_is_named_and_no_idle_one_and_a_rerun_goes_on(
    start: Start, stage: StagePaths
) -> None:
    process = start(**STAGE)
    wait_for_step(stage, 7)
    Path(stage.root, "loop").touch()
    finish(process)

    found = diagnose(stage)
    assert found["diagnosis"]["culprits"] == {"ranks": [2], "nodes": [], "roles": []}
    assert found["diagnosis"]["cause"] == "user_code"
    assert "policy_actors.py" in found["summary"]

    Path(stage.root, "loop").unlink()
    before = len(rows(stage))
    output = finish(start(**STAGE))

    assert "resuming from" in output
    assert read_json(stage.outcome)["state"] == "completed"
    begin = first_step_of_rerun([row["step"] for row in rows(stage)[before:]])
    assert begin % 5 == 1
    assert begin > 5
    # The actors' states went on as well: each has made as many updates as there were steps.
    states = read_json(stage.root / "states" / f"step_{STEPS}.json")
    assert states == {"step": STEPS, "updates": [STEPS] * 4}


def test_a_killed_actor_is_named_by_its_class_and_process(start: Start, stage: StagePaths) -> None:
    process = start(**STAGE)
    wait_for_step(stage, 3)
    killed = pids(stage)[1]
    os.kill(killed, signal.SIGKILL)
    finish(process)

    found = diagnose(stage)["diagnosis"]
    assert read_json(stage.outcome)["state"] == "failed"
    # All others ended with the driver, and with them what tells their ranks.
    assert found["culprits"] == {
        "ranks": [],
        "nodes": [],
        "roles": [f"actor PolicyWorker process {killed}"],
    }
