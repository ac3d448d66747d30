"""Which model a stage starts from, and what its plan takes from the config."""

from pathlib import Path

import pytest

from shakedown.config import Config, parse_config
from shakedown.core.errors import ConfigError, ExitCode, UsageError
from shakedown.core.files import write_json
from shakedown.core.outcome import Outcome, OutcomeState
from shakedown.core.paths import RunPaths
from shakedown.training.assets import Assets
from shakedown.training.stage.job import read_job
from shakedown.training.stage.plan import plan_stage

ASSETS = Assets("/the/model", "train.jsonl", "heldout.jsonl")


@pytest.fixture
def config() -> Config:
    stage = {"algorithm": "sft", "allocation": "fsdp:d2", "steps": 1, "batch_size": 2}
    stages = {name: {**stage, "optimizer": {"lr": 0.1}} for name in ("first", "second")}
    data = {"train": "demo", "heldout": "demo"}
    body = {"run": "r", "model": {"source": "demo"}, "data": data, "agents": {"target": "a:B"}}
    return parse_config({**body, "stages": stages, "seed": 5})


def _model_of(config: Config, stage: str, root: Path, model: Path | None = None) -> str:
    return plan_stage(config, stage, RunPaths(root), ASSETS, model=model).job.model


def _end(root: Path, state: OutcomeState) -> Path:
    """The first stage ends, and leaves a model."""
    paths = RunPaths(root).stage("first")
    Outcome("first", 1, state, "").write(paths.outcome)
    write_json(paths.export / "config.json", {})
    return paths.export


def test_a_plan_takes_model_data_and_ranks_from_assets_and_config(
    config: Config, tmp_path: Path
) -> None:
    job = plan_stage(config, "first", RunPaths(tmp_path), ASSETS).job

    assert (job.model, job.train, job.heldout) == ("/the/model", "train.jsonl", "heldout.jsonl")
    assert (job.world_size, job.seed, job.replay) == (2, 5, "")


@pytest.mark.parametrize(("gpus", "budget"), [(0, None), (8, 64 * 2048)])
def test_the_ranks_are_told_the_micro_batches_that_fit_their_gpus(
    config: Config, tmp_path: Path, gpus: int, budget: int | None
) -> None:
    small = Path(__file__).parents[2] / "data" / "models" / "qwen3-0.6b"
    cluster = config.cluster.model_copy(update={"gpus_per_node": gpus, "gpu_model": "h200"})
    serve = config.serve.model_copy(update={"max_model_len": 2048})
    more = {"batch_size": 128, "activation_checkpointing": True}
    first = config.own_stages["first"].model_copy(update=more)
    asked = config.model_copy(
        update={"cluster": cluster, "serve": serve, "stages": {"first": first}}
    )

    job = plan_stage(asked, "first", RunPaths(tmp_path), ASSETS, model=small).job

    job.write(tmp_path / "job.json")
    told = read_job(tmp_path / "job.json").config
    assert (told.micro_batch_size, told.max_tokens_per_micro_batch) == (None, budget)


def test_a_stage_starts_from_the_model_of_the_one_before(config: Config, tmp_path: Path) -> None:
    exported = _end(tmp_path, "completed")

    assert _model_of(config, "second", tmp_path) == str(exported)


@pytest.mark.parametrize("state", ["hung", "failed", None])
def test_a_stage_before_that_has_not_completed_is_named(
    config: Config, tmp_path: Path, state: OutcomeState | None
) -> None:
    if state is not None:
        _end(tmp_path, state)

    with pytest.raises(ConfigError, match="shakedown train first"):
        _model_of(config, "second", tmp_path)


def test_a_given_model_wins_and_has_to_be_one(config: Config, tmp_path: Path) -> None:
    write_json(tmp_path / "own" / "config.json", {})

    assert _model_of(config, "second", tmp_path, tmp_path / "own") == str(tmp_path / "own")
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        _model_of(config, "second", tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("completed", ExitCode.OK),
        ("hung", ExitCode.FAIL),
        ("failed", ExitCode.FAIL),
        ("interrupted", ExitCode.UNKNOWN),
    ],
)
def test_exit_code_follows_the_outcome(state: OutcomeState, code: ExitCode) -> None:
    assert Outcome("sft", 1, state, "").exit_code == code
