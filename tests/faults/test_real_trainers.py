"""Trainers of other projects as stages, unmodified, on two CPU ranks: healthy, hung, killed, rerun.

Their scripts (tests/data/trainers) are ordinary user code of the Trainer of transformers, of TRL
and of Lightning, which know nothing of shakedown.
"""

import fcntl
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.core.paths import StagePaths
from shakedown.training.demo import write_model
from tests.faults.command_stage import Start, diagnose, finish, pid_of_rank, rows, wait_for_step
from tests.trainer_pythons import TRAINERS_PYTHON, needs_trainers
from tests.workflow.helpers import ROOT, processes_that_mention, read_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, needs_trainers]

SCRIPTS = ROOT / "tests" / "data" / "trainers"
STEPS = 24
# The bar of the Trainer alone: those of its preparations begin with a name.
BAR = {"pattern": r"(?:^|\]:) *\d+%\|.*\| *(?P<step>\d+)/\d+ \["}
BASE: dict[str, Any] = {
    "algorithm": "command",
    "python": TRAINERS_PYTHON,
    "ranks_per_node": 2,
    "steps": STEPS,
    "outputs": ["{stage}/out"],
    "stall_timeout": 10.0,
    "start_timeout": 300.0,
}
# How each is launched, where its steps and checkpoints are: as its users have them.
TRAINERS: dict[str, dict[str, Any]] = {
    "hf_trainer": {
        "launch": "torchrun",
        "command": "{script} --model {model} --out {{stage}}/out",
        "progress": {"tensorboard": "{stage}/out/runs", "tag": "train/loss"},
    },
    "trl_sft": {
        "launch": "accelerate",
        "command": "--multi_gpu {script} --model {model} --out {{stage}}/out",
        "progress": BAR,
    },
    "trl_grpo": {
        "launch": "accelerate",
        "command": "--multi_gpu {script} --model {model} --out {{stage}}/out "
        "--spin-on {{stage}}/spin",
        "progress": BAR,
    },
    "lightning_ddp": {
        "launch": "torchrun",
        "command": "{script} --out {{stage}}/out",
        # It counts from 0: after the last of 24 steps its log has 23.
        "progress": {"file": "{stage}/out/metrics/*/metrics.csv", "column": "step"},
        "resume": {"glob": "{stage}/out/step=*.ckpt", "arguments": "--resume {resume}"},
    },
}
RESUME = {
    "glob": "{stage}/out/checkpoint-*",
    "complete": "trainer_state.json",
    "arguments": "--resume {resume}",
}


@pytest.fixture
def begin(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a trainer's stage with a tiny model of random weights."""
    write_model(tmp_path / "model", seed=0)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(trainer: str, **changes: Any) -> Any:
        own = {"resume": RESUME, **TRAINERS[trainer]}
        script = SCRIPTS / f"{trainer}.py"
        words = own["command"].format(script=script, model=tmp_path / "model")
        own["command"] = f"{words} --steps {STEPS}"
        return start(**{**BASE, **own, **changes})

    return run


def stop(pid: int, _stage: StagePaths) -> None:
    os.kill(pid, signal.SIGSTOP)


def spin(_pid: int, stage: StagePaths) -> None:
    Path(stage.root, "spin").touch()


def lock(_pid: int, stage: StagePaths) -> None:
    """Another program takes the lock of rank 1's cache, and keeps it."""
    HELD.append(os.open(stage.root / "out" / "cache" / "cache-1.lock", os.O_WRONLY))
    fcntl.flock(HELD[-1], fcntl.LOCK_EX)


HELD: list[int] = []


def undo(stage: StagePaths) -> None:
    Path(stage.root, "spin").unlink(missing_ok=True)
    while HELD:
        os.close(HELD.pop())


@pytest.fixture(autouse=True)
def undone(stage: StagePaths) -> Iterator[None]:
    yield
    undo(stage)


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


@pytest.mark.parametrize(
    ("trainer", "fault"),
    [
        ("hf_trainer", stop),
        ("trl_sft", stop),
        ("trl_grpo", stop),
        ("trl_grpo", spin),
        ("lightning_ddp", stop),
        ("lightning_ddp", lock),
    ],
)
def test_a_hung_rank_is_named_and_the_stage_goes_on_from_the_trainers_own_checkpoint(
    begin: Start,
    stage: StagePaths,
    tmp_path: Path,
    trainer: str,
    fault: Callable[[int, StagePaths], None],
) -> None:
    process = begin(trainer)
    wait_for_step(stage, 13)
    fault(pid_of_rank(1, tmp_path), stage)
    finish(process)

    outcome, found = read_json(stage.outcome), diagnose(stage)["diagnosis"]
    assert (process.returncode, outcome["state"]) == (1, "hung")
    assert found["state"] == "hung"
    assert found["culprits"] == {"ranks": [1], "nodes": [], "roles": []}
    assert not processes_that_mention(str(tmp_path / "r"))

    undo(stage)
    output = finish(begin(trainer))

    assert "resuming from" in output
    assert read_json(stage.outcome)["state"] == "completed"
    steps = [row["step"] for row in rows(stage)]
    second = next(i for i, (a, b) in enumerate(itertools.pairwise(steps), 1) if b <= a)
    # A bar is drawn with 0 before it is set to where the trainer goes on.
    assert min(filter(None, steps[second:])) >= 10


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_a_killed_rank_is_named(
    begin: Start, stage: StagePaths, tmp_path: Path, trainer: str
) -> None:
    process = begin(trainer)
    wait_for_step(stage, 5)
    os.kill(pid_of_rank(1, tmp_path), signal.SIGKILL)
    finish(process)

    found = diagnose(stage)["diagnosis"]
    assert read_json(stage.outcome)["state"] == "failed"
    assert found["culprits"] == {"ranks": [1], "nodes": [], "roles": []}
    assert not processes_that_mention(str(tmp_path / "r"))
