"""Ray's actors that fail: the one that does is named by its rank or its process, and nobody else.

The driver (tests/data/trainers/policy_actors.py) knows nothing of shakedown.
"""

import subprocess
import sys
from typing import Any

import pytest

from shakedown.core.paths import StagePaths
from tests.faults.command_stage import Start, diagnose, finish, rows, wait_for_step
from tests.trainer_pythons import needs_ray
from tests.trainer_stages import ACTORS, first_step_of_rerun, outside, pids_of_actors
from tests.workflow.helpers import read_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, needs_ray]

STEPS = 60
STAGE: dict[str, Any] = {
    **ACTORS,
    "command": f"{ACTORS['command']} --steps {STEPS}",
    "steps": STEPS,
}


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
    stopped = pids_of_actors(stage)[3]
    with outside("stopped", stopped, stage):
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


@pytest.mark.parametrize("fault", ["loop", "lock"])
def test_an_actor_in_a_loop_or_at_a_lock_is_named_and_no_idle_one_and_a_rerun_goes_on(
    start: Start, stage: StagePaths, fault: str
) -> None:
    process = start(**STAGE)
    wait_for_step(stage, 7)
    with outside(fault, pids_of_actors(stage)[2], stage, rank=2):
        finish(process)

    found = diagnose(stage)
    assert found["diagnosis"]["culprits"] == {"ranks": [2], "nodes": [], "roles": []}
    assert found["diagnosis"]["cause"] == "user_code"
    assert "read_cache (cache.py:" in found["summary"], found["summary"]

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
    killed = pids_of_actors(stage)[1]
    with outside("killed", killed, stage):
        finish(process)

    found = diagnose(stage)["diagnosis"]
    assert read_json(stage.outcome)["state"] == "failed"
    # All others ended with the driver, and with them what tells their ranks.
    assert found["culprits"] == {
        "ranks": [],
        "nodes": [],
        "roles": [f"actor PolicyWorker process {killed}"],
    }
