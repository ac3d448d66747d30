"""Trainers of other projects as stages, unmodified, on two CPU ranks: healthy, hung, killed, rerun.

Their scripts (tests/data/trainers) are ordinary user code of the Trainer of transformers, of TRL
and of Lightning, which know nothing of shakedown.
"""

from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import StagePaths
from shakedown.training.demo import write_model
from tests.faults.command_stage import Start, diagnose, finish, pid_of_rank, rows, wait_for_step
from tests.trainer_pythons import needs_trainers
from tests.trainer_stages import BAR, STEPS, TRAINERS, first_step_of_rerun, outside, trainer_stage
from tests.workflow.helpers import processes_that_mention, read_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, needs_trainers]


@pytest.fixture
def begin(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a trainer's stage with a tiny model of random weights."""
    write_model(tmp_path / "model", seed=0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(trainer: str, **changes: Any) -> Any:
        own = trainer_stage(trainer, tmp_path / "model")
        return start(**{**own, "ranks_per_node": 2, **changes})

    return run


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_it_completes_with_its_steps_and_its_curves(
    begin: Start, stage: StagePaths, trainer: str
) -> None:
    process = begin(trainer)
    finish(process)

    outcome = read_json(stage.outcome)
    last = STEPS - 1 if trainer == "lightning_ddp" else STEPS
    assert (process.returncode, outcome["state"], outcome["steps"]) == (0, "completed", last)
    assert rows(stage)[-1]["step"] == last
    # The Trainer prints its numbers beside its bar: they are in its event files.
    has_curves = TRAINERS[trainer]["progress"] is not BAR
    assert any("loss" in name for name in rows(stage)[-1]) or not has_curves


@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize("fault", ["stopped", "loop", "lock"])
def test_a_hung_rank_is_named_and_the_stage_goes_on_from_the_trainers_own_checkpoint(
    begin: Start, stage: StagePaths, tmp_path: Path, trainer: str, fault: str
) -> None:
    process = begin(trainer)
    wait_for_step(stage, 13)
    with outside(fault, pid_of_rank(1, tmp_path), stage):
        finish(process)

    outcome, found = read_json(stage.outcome), diagnose(stage)
    assert (process.returncode, outcome["state"]) == (1, "hung")
    assert found["diagnosis"]["state"] == "hung"
    assert found["diagnosis"]["culprits"] == {"ranks": [1], "nodes": [], "roles": []}
    assert fault == "stopped" or "read_cache (cache.py:" in found["summary"], found["summary"]
    assert not processes_that_mention(str(tmp_path / "r"))

    before = len(rows(stage))
    output = finish(begin(trainer))

    assert "resuming from" in output
    assert read_json(stage.outcome)["state"] == "completed"
    assert first_step_of_rerun([row["step"] for row in rows(stage)[before:]]) >= 10


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_a_killed_rank_is_named(
    begin: Start, stage: StagePaths, tmp_path: Path, trainer: str
) -> None:
    process = begin(trainer)
    wait_for_step(stage, 5)
    with outside("killed", pid_of_rank(1, tmp_path), stage):
        finish(process)

    found = diagnose(stage)["diagnosis"]
    assert read_json(stage.outcome)["state"] == "failed"
    assert found["culprits"] == {"ranks": [1], "nodes": [], "roles": []}
    assert not processes_that_mention(str(tmp_path / "r"))
