"""Stages of unmodified trainers: their scripts, launch lines, progress and checkpoints.

The scripts (tests/data/trainers) are ordinary user code, which knows nothing of shakedown.
"""

import fcntl
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shakedown.core.paths import StagePaths
from tests.trainer_pythons import RAY_PYTHON, TRAINERS_PYTHON
from tests.workflow.helpers import ROOT

SCRIPTS = ROOT / "tests" / "data" / "trainers"
STEPS = 24
# The bar of the Trainer alone: those of its preparations begin with a name.
BAR = {"pattern": r"(?:^|\]:) *\d+%\|.*\| *(?P<step>\d+)/\d+ \["}
BASE: dict[str, Any] = {
    "algorithm": "command",
    "python": TRAINERS_PYTHON,
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
        "command": "--multi_gpu {script} --model {model} --out {{stage}}/out",
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
# What stands in front of a lab's own script, by launcher; `none` is its own launch line.
FRONTS = {
    "torchrun": "",
    "srun": f"{sys.executable} -u ",
    "accelerate": "--multi_gpu ",
    "none": f"{sys.executable} -m torch.distributed.run --nproc-per-node={{ranks_per_node}} "
    "--master-port={port} ",
}
RESUME = {
    "glob": "{stage}/out/checkpoint-*",
    "complete": "trainer_state.json",
    "arguments": "--resume {resume}",
}


# The same of a driver of Ray's with four actors; its `--steps` is the caller's.
ACTORS: dict[str, Any] = {
    "algorithm": "command",
    "launch": "ray",
    "python": RAY_PYTHON,
    "command": f"python {SCRIPTS / 'policy_actors.py'} --out {{stage}}/states "
    "--cache {stage}/cache",
    "progress": {"pattern": r"step (?P<step>\d+)"},
    "resume": {"glob": "{stage}/states/step_*.json", "arguments": "--resume {resume}"},
    "outputs": ["{stage}/states"],
    "stall_timeout": 10.0,
    "start_timeout": 240.0,
}


def pids_of_actors(stage: StagePaths) -> list[int]:
    """In the order of their ranks, by the driver's newest line of a step."""
    log = stage.latest.joinpath("logs", "trainer-launch.log").read_text()
    # Ray may write a line of its own behind it.
    return [int(word) for word in log.rpartition("pids=")[2].splitlines()[0].split()]


@contextmanager
def outside(fault: str, pid: int, stage: StagePaths, rank: int = 1) -> Iterator[None]:
    """Does that to the process of a rank from outside; what lasts is undone at the end."""
    cache = stage.root / "cache"
    match fault:
        case "stopped" | "killed":
            os.kill(pid, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
            yield
        case "loop":
            (cache / f"rank{rank}.busy").touch()
            yield
            (cache / f"rank{rank}.busy").unlink()
        case "lock":
            with (cache / f"rank{rank}.lock").open("w") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
                yield
        case _:
            raise AssertionError(fault)


def trainer_stage(trainer: str, model: Path) -> dict[str, Any]:
    """The keys of its stage, which trains the model of a folder; nodes and ranks are left out."""
    own = {**BASE, "resume": RESUME, **TRAINERS[trainer]}
    words = own["command"].format(script=SCRIPTS / f"{trainer}.py", model=model)
    return {**own, "command": f"{words} --cache {{stage}}/cache --steps {STEPS}"}


def first_step_of_rerun(steps: Sequence[int]) -> int:
    """Where a rerun went on, of its own steps."""
    # A bar is drawn with 0 before it is set to where the trainer goes on.
    return min(filter(None, steps))
