"""What a stage says of its steps: those of other settings or inputs, or without a loss that its
model asks for.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen3MoeConfig

from shakedown.core.outcome import read_outcome
from shakedown.core.paths import StagePaths
from shakedown.core.verdict import read_verdict
from tests.demo_assets import write_assets
from tests.tiny_models import SMALL, write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SFT: dict[str, Any] = {
    "algorithm": "sft",
    "allocation": "fsdp:d1",
    "steps": 2,
    "batch_size": 2,
    "eval_samples": 0,
}


class Lab:
    """One SFT stage of two steps in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.assets = write_assets(folder)
        self.reward = folder / "own.py"
        self.reward.write_text("def reward(completion, answer):\n    return 0\n", encoding="utf-8")
        self.paths = StagePaths(folder / "r" / "stages" / "sft")

    def train(self, *options: str, lr: float = 0.002, **changes: Any) -> tuple[int, str]:
        """Exit code and output of `shakedown train sft`."""
        folder = self.assets
        body = {
            "run": "r",
            "results": str(folder),
            "model": {"source": "demo"},
            "data": {"train": "demo", "heldout": "demo", "reward": f"{self.reward}:reward"},
            "agents": {"target": "a:B"},
            "stages": {"sft": {**SFT, "optimizer": {"lr": lr}, **changes}},
        }
        (folder / "c.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")
        command = [sys.executable, "-m", "shakedown.cli", "train", "sft", "--config", "c.yaml"]
        command += ["--assets", "assets.json", *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def accept(self) -> tuple[int, str]:
        command = [sys.executable, "-m", "shakedown.cli", "accept", str(self.paths.outcome)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def lrs(self, metrics: Path | None = None) -> list[float]:
        text = (metrics or self.paths.metrics).read_text(encoding="utf-8")
        return [json.loads(line)["lr"] for line in text.splitlines()]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_finished_stage_is_not_the_result_of_a_learning_rate_that_came_after_its_end(
    lab: Lab,
) -> None:
    assert lab.train()[0] == 0

    code, said = lab.train(lr=1e-5)

    why = "steps 1 to 2 ran before optimizer.lr 0.002 -> 1e-05"
    why = f"0 of 2 steps ran with the current settings: {why}"
    assert (code, lab.accept()[0]) == (1, 1), said
    assert why in said
    assert "a separate `run:` name" in said
    assert "train again under this one: shakedown train sft " in said
    assert said.count("--restart") >= 1
    assert read_outcome(lab.paths.outcome).sentence == why
    assert read_verdict(lab.paths.verdict).status == "FAIL"
    assert lab.train()[0] == lab.accept()[0] == 0, "what was asked first is still its result"

    code, said = lab.train("--restart", lr=1e-5)

    assert (code, lab.accept()[0]) == (0, 0), said
    assert lab.lrs() == [1e-5, 1e-5]
    kept = lab.paths.attempt(3).replaced
    assert {"checkpoints", "model", "metrics.jsonl", "outcome.json"} <= {
        path.name for path in kept.iterdir()
    }
    assert lab.lrs(kept / "metrics.jsonl") == [0.002, 0.002]


def test_a_stage_that_went_on_with_another_learning_rate_warns_which_steps_had_which(
    lab: Lab,
) -> None:
    assert lab.train()[0] == 0

    code, said = lab.train(lr=1e-5, steps=3)

    assert code == 0
    assert "changed after step 2: steps 2 -> 3, optimizer.lr 0.002 -> 1e-05" in said
    code, said = lab.accept()
    assert code == 0
    assert "accept sft: WARN" in said
    assert "1 of 3 steps ran with the current settings: steps 1 to 2 ran before" in said
    assert lab.train(lr=1e-5, steps=4)[0] == 0
    code, said = lab.train(lr=1e-5, steps=2)
    assert code == 1
    assert "4 steps are done but only 2 are requested" in said


def _middle(lab: Lab) -> None:
    """Another row in the middle of a file of the same size."""
    path = lab.assets / "train.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    middle = len(lines) // 2
    answer = json.loads(lines[middle])["answer"]
    lines[middle] = lines[middle].replace(answer, "9" * len(answer))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _template(lab: Lab) -> None:
    path = lab.assets / "model" / "chat_template.jinja"
    path.write_text("Q:" + path.read_text(encoding="utf-8"), encoding="utf-8")


def _reward(lab: Lab) -> None:
    lab.reward.write_text("def reward(completion, answer):\n    return 1\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "name"),
    [(_middle, "data"), (_template, "chat_template"), (_reward, "reward_source")],
)
def test_other_contents_under_the_same_names_start_the_stage_anew_and_say_so(
    lab: Lab, change: Any, name: str
) -> None:
    rows = (lab.assets / "train.jsonl").read_text(encoding="utf-8")
    (lab.assets / "train.jsonl").write_text(rows * (4_000_000 // len(rows)), encoding="utf-8")
    assert lab.train()[0] == 0
    change(lab)

    code, said = lab.accept()
    assert code == 1
    assert f"steps 1 to 2 ran before {name} sha256:" in said
    code, said = lab.train(steps=3)

    assert code == 0
    assert f"checkpoint step_000002 belongs to another configuration ({name}: sha256:" in said
    assert "starting from the input model" in said
    assert lab.accept()[0] == 0
    assert len(lab.lrs()) == 3


def test_experts_trained_without_the_loss_that_balances_them_are_told_from_the_start_to_the_gate(
    lab: Lab,
) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {**SMALL, **experts, "max_position_embeddings": 256}
    write_tiny(lab.assets / "model", Qwen3MoeConfig(**sizes, output_router_logits=True))

    code, said = lab.train()

    assert code == 0, said
    warning = "WARN experts [config model.source], measured output_router_logits: true"
    assert warning in said.partition("step 1/2")[0]
    assert warning in said.partition("completed: all steps done")[2]
    code, said = lab.accept()
    assert code == 0
    assert "accept sft: WARN" in said
    assert "the router is trained without router_aux_loss_coef" in said


def test_a_command_is_not_restarted_as_its_checkpoints_are_its_own(lab: Lab) -> None:
    command = {"algorithm": "command", "command": "true", "launch": "none"}
    body = {"run": "r", "results": str(lab.assets), "stages": {"sft": command}}
    (lab.assets / "c.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")
    told = [sys.executable, "-m", "shakedown.cli", "train", "sft", "--config", "c.yaml"]

    done = subprocess.run(
        [*told, "--restart"], cwd=lab.assets, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "--restart: stage 'sft' is a command" in done.stderr
    assert not lab.paths.attempts.exists()
