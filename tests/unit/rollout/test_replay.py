"""Recorded rollouts trained on again: refused when not whole, equal on two engines."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from shakedown import cli
from shakedown.config import load_config
from shakedown.core.paths import StagePaths
from shakedown.data_sources.conversations import load_rows
from shakedown.models import huggingface
from shakedown.models.chat import encode_prompt
from shakedown.rollout.batch import RolloutBatch, write_batch
from shakedown.rollout.recording import Recorder, ranges, recorded_steps, step_file
from shakedown.training.checkpoint.fingerprint import fingerprint
from shakedown.training.stage.job import StageJob
from tests.demo_assets import write_assets
from tests.measured import without_measured
from tests.workflow.helpers import ROOT

STEPS, GROUPS, SAMPLES, LENGTH = 2, 4, 4, 5


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


def sampled(assets: Path, step: int) -> RolloutBatch:
    """Real answers of the model with its own log-probabilities; an even sum of tokens is good."""
    model = huggingface.read_model(assets / "model").eval()
    tokenizer = huggingface.read_tokenizer(assets / "model")
    rows = load_rows(str(assets / "train.jsonl"))[step * GROUPS : (step + 1) * GROUPS]
    prompts = [encode_prompt(tokenizer, row.messages) for row in rows]
    torch.manual_seed(step)
    begun = torch.tensor([prompt for prompt in prompts for _ in range(SAMPLES)])
    with torch.no_grad():
        tokens = model.generate(begun, max_new_tokens=LENGTH, do_sample=True, top_k=0)
        scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    chosen = scores.gather(2, tokens[:, 1:, None])[:, :, 0]
    mask = np.zeros(tokens.shape, dtype=np.bool_)
    mask[:, begun.shape[1] :] = True
    ended = (tokens.numpy() == tokenizer.eos_token_id).cumsum(1)
    mask &= ended - (tokens.numpy() == tokenizer.eos_token_id) == 0
    logprobs = np.zeros(tokens.shape, dtype=np.float32)
    logprobs[:, 1:] = chosen.numpy()
    return RolloutBatch(
        step=step,
        versions=np.zeros(GROUPS * SAMPLES, dtype=np.int64),
        tokens=tokens.numpy(),
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        rewards=(tokens.numpy().sum(1) % 2 == 0).astype(np.float32),
        groups=np.repeat(np.arange(GROUPS), SAMPLES),
        stats={"batch_seconds": 1.0},
    )


@pytest.fixture(scope="module")
def recorded(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "rollouts"
    for step in range(1, STEPS + 1):
        write_batch(sampled(assets, step), step_file(folder, step))
    return folder


def command(
    root: Path, assets: Path, replay: Path, *, stage: str = "grpo", **changes: Any
) -> list[str]:
    """`shakedown train STAGE --replay DIR` with results below `root`."""
    body = load_config(ROOT / "config" / "config.yaml").model_dump(mode="json")
    body |= {"run": "replay", "results": str(root)}
    body["stages"]["grpo"] |= {"eval_samples": 0, "steps": STEPS, "batch_size": GROUPS, **changes}
    config = root / "config.yaml"
    root.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(body), encoding="utf-8")
    arguments = ["train", stage, "--config", str(config), "--replay", str(replay)]
    arguments += ["--assets", str(assets / "assets.json"), "--model", str(assets / "model")]
    return arguments


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    """All updates of a training in one vector."""
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_the_same_recorded_rollouts_give_the_same_updates_on_two_engines(
    assets: Path, recorded: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in recorded.iterdir()}
    rows, models = {}, {}
    for allocation in ("fsdp:d1", "megatron:t2"):
        root = tmp_path / allocation.replace(":", "-")
        arguments = command(root, assets, recorded, allocation=allocation, micro_batch_size=6)
        subprocess.run([sys.executable, "-m", "shakedown.cli", *arguments], check=True)
        stage = StagePaths(root / "replay" / "stages" / "grpo")
        lines = map(json.loads, stage.metrics.read_text(encoding="utf-8").splitlines())
        rows[allocation] = without_measured(list(lines))
        models[allocation] = load_file(stage.export / "model.safetensors")
        assert sorted(p.stem for p in stage.latest.joinpath("logs").iterdir()) == [
            f"trainer-rank{rank}" for rank in range(1 if allocation == "fsdp:d1" else 2)
        ], "no server and no orchestrator"

    first, second = rows["fsdp:d1"], rows["megatron:t2"]
    assert [row["step"] for row in first] == [1, 2]
    assert first[0]["k3"] < 1e-9, "the engine's log-probabilities are the model's"
    # float32 has steps of 9.5e-7 near the log-probabilities of this model.
    assert second == [pytest.approx(row, rel=1e-4, abs=2e-6) for row in first]
    started = load_file(assets / "model" / "model.safetensors")
    ours, theirs = (moved(started, models[name]) for name in ("fsdp:d1", "megatron:t2"))
    assert ours.norm() > 0
    assert (ours - theirs).norm() < 1e-2 * ours.norm()
    assert {path.name: path.read_bytes() for path in recorded.iterdir()} == before


def test_missing_steps_are_refused_with_what_is_there(
    assets: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(command(tmp_path, assets, recorded, steps=5))

    assert code == 2
    said = capsys.readouterr().err
    assert "no batch for steps 3-5 of 5: steps 1-2 are there" in said
    assert "set the stage's steps to 2" in said
    assert not (tmp_path / "replay").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("given", "word"),
    [("none", "there is no folder of recorded rollouts"), ("empty", "no step_*.npz is there")],
)
def test_a_folder_without_rollouts_is_refused(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, word: str
) -> None:
    (tmp_path / "empty").mkdir()

    assert cli.main(command(tmp_path, assets, tmp_path / given)) == 2
    assert word in capsys.readouterr().err


def test_damaged_and_mixed_up_steps_are_refused_by_name(
    assets: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    whole = step_file(recorded, 1).read_bytes()
    step_file(folder, 1).write_bytes(whole[:-200])
    step_file(folder, 2).write_bytes(whole)

    code = cli.main(command(tmp_path, assets, folder))

    assert code == 3
    said = capsys.readouterr().err
    assert "2 of 2 recorded batches are damaged" in said
    assert str(step_file(folder, 1)) in said
    assert f"{step_file(folder, 2)} is the batch of step 1" in said


def test_a_replay_never_goes_over_the_stage_that_recorded_it(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = StagePaths(tmp_path / "replay" / "stages" / "grpo").rollouts
    own.mkdir(parents=True)

    assert cli.main(command(tmp_path, assets, own)) == 2
    assert "--run-dir" in capsys.readouterr().err


def test_a_stage_without_rollouts_and_a_foreign_model_are_refused(
    assets: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(tmp_path, assets, recorded, stage="sft")) == 2
    assert "only grpo has rollouts" in capsys.readouterr().err
    assert cli.main([*command(tmp_path, assets, recorded), "--model", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_a_batch_is_kept_where_hard_links_do_not_work(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    Recorder(tmp_path / "kept").keep(step_file(recorded, 2), 2)

    assert recorded_steps(tmp_path / "kept") == [2]
    assert step_file(tmp_path / "kept", 2).read_bytes() == step_file(recorded, 2).read_bytes()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step_000002.npz"]


def test_steps_are_told_in_ranges() -> None:
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_other_recorded_rollouts_make_a_checkpoint_foreign(
    assets: Path, recorded: Path, tmp_path: Path
) -> None:
    config = load_config(ROOT / "config" / "config.yaml").own_stages["grpo"]
    model, rows = str(assets / "model"), str(assets / "train.jsonl")
    job = StageJob("s", config, model, "float32", rows, rows, "r", 0, 1, "", "")
    other = tmp_path / "other"
    Recorder(other).keep(step_file(recorded, 1), 1)

    replayed = fingerprint(replace(job, replay=str(recorded)))

    assert fingerprint(job) == {k: v for k, v in replayed.items() if k != "replay"}
    assert fingerprint(replace(job, replay=str(other)))["replay"] != replayed["replay"]
