"""A loss that is NaN or infinite: what was trained on is saved before the rank ends."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shakedown.config import StageConfig
from shakedown.core.errors import CannotJudgeError, StorageError
from shakedown.core.paths import StagePaths
from shakedown.monitor.heartbeat import Heartbeat
from shakedown.rollout.batch import RolloutBatch, read_batch, write_batch
from shakedown.rollout.recording import recorded_steps, step_file
from shakedown.rollout.store import RolloutStore
from shakedown.training.context import Context
from shakedown.training.coordination import Ranks
from shakedown.training.demo import addition_rows, write_model, write_rows
from shakedown.training.engines.fsdp import FsdpEngine
from shakedown.training.faults import Injector
from shakedown.training.nan_guard import DivergedError
from shakedown.training.stage.job import StageJob
from shakedown.training.stage.stopping import StopFlag
from shakedown.training.trainer import Trainer

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "allocation": "fsdp:d1",
    "steps": 3,
    "batch_size": 4,
    "checkpoint_every": 2,
    "eval_samples": 0,
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_model(folder / "model", seed=0)
    train, _ = addition_rows(train_size=40, heldout_size=1, seed=0)
    write_rows(folder / "train.jsonl", train)
    return folder


def rollouts(step: int) -> RolloutBatch:
    """Two groups of two, one sample of each rewarded."""
    draw = np.random.default_rng(step)
    mask = np.zeros((4, 7), dtype=np.bool_)
    mask[:, 4:] = True
    return RolloutBatch(
        step=step,
        versions=np.full(4, step - 1, dtype=np.int64),
        tokens=draw.integers(3, 90, (4, 7), dtype=np.int64),
        loss_mask=mask,
        logprobs=np.where(mask, -4.5, 0.0).astype(np.float32),
        rewards=np.array([1, 0, 1, 0], dtype=np.float32),
        groups=np.repeat(np.arange(2), 2),
    )


class Rank:
    """The only rank of a stage, in this process."""

    def __init__(self, assets: Path, root: Path) -> None:
        self.paths, self._assets = StagePaths(root / "stage"), assets

    def job(self, algorithm: str, *, lr: float, replay: str = "", **grpo: Any) -> StageJob:
        """A new attempt."""
        settings = {"group_size": 2, "max_tokens": 3, "batch_timeout": 5.0, **grpo}
        config = {
            **CONFIG,
            "algorithm": algorithm,
            "optimizer": {"lr": lr},
            "grpo": settings if algorithm == "grpo" else None,
        }
        attempt = self.paths.new_attempt()
        return StageJob(
            stage="stage",
            config=StageConfig.model_validate(config),
            model=str(self._assets / "model"),
            dtype="float32",
            train=str(self._assets / "train.jsonl"),
            heldout="",
            reward="exact_match",
            seed=0,
            world_size=1,
            stage_root=str(self.paths.root),
            attempt_root=str(attempt.root),
            replay=replay,
        )

    def run(self, job: StageJob, stop: StopFlag | None = None) -> bool:
        """Train; the process group ends with it."""
        store = dist.FileStore(str(job.attempt.root / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            engine = FsdpEngine.build(
                Path(job.model), optimizer=job.config.optimizer, dtype="float32", device=CPU
            )
            beats, faults = Heartbeat(job.attempt.heartbeats, 0), Injector(None, 0)
            context = Context(
                job, engine, Ranks(store, device=CPU, key=b"key"), beats, faults, stop or StopFlag()
            )
            return Trainer(context).run()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@pytest.fixture
def rank(assets: Path, tmp_path: Path) -> Rank:
    return Rank(assets, tmp_path)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_run_that_diverges_leaves_its_batch_and_names_the_file(
    rank: Rank, tmp_path: Path, algorithm: str
) -> None:
    for step in (1, 2, 3):
        write_batch(rollouts(step), step_file(tmp_path / "recorded", step))
    replay = str(tmp_path / "recorded") if algorithm == "grpo" else ""
    job = rank.job(algorithm, lr=1e30, replay=replay)

    with pytest.raises(DivergedError, match="step 2: grad_norm is not a finite number") as raised:
        rank.run(job)

    path = job.attempt.diverged(0)
    assert str(path) in str(raised.value)
    with np.load(path, allow_pickle=False) as saved:
        arrays = dict(saved)
    assert arrays["step"] == 2, "the first update is what broke the weights"
    assert arrays["broken"].tolist() == ["grad_norm"]
    numbers = dict(zip(arrays["metrics"].tolist(), arrays["values"], strict=True))
    assert not np.isfinite(numbers["grad_norm"])
    assert numbers["lr"] == pytest.approx(1e30)
    rows, columns = arrays["tokens"].shape
    assert (rows, columns) == arrays["mask"].shape
    assert arrays["mask"].sum() == numbers["trained_tokens"]
    assert arrays["lengths"].max() == columns
    if algorithm == "grpo":
        assert arrays["tokens"].tolist() == rollouts(2).tokens.tolist()
        assert arrays["extra.advantages"].tolist() == pytest.approx([0.707, -0.707] * 2, abs=1e-3)
        assert {"extra.logprobs", "extra.share"} <= arrays.keys()


def test_a_disk_that_takes_no_batch_does_not_hide_the_divergence(rank: Rank) -> None:
    job = rank.job("sft", lr=1e30)
    (job.attempt.root / "diverged").write_text("in the way")

    with pytest.raises(DivergedError, match="its batch could not be saved: cannot write"):
        rank.run(job)


def test_the_weights_of_the_last_step_are_published_for_nobody(rank: Rank) -> None:
    job = rank.job("grpo", lr=1e-3)
    exchange = RolloutStore(job.attempt.exchange)
    for step in range(1, job.config.steps + 1):
        exchange.publish_batch(rollouts(step))

    assert rank.run(job) is True

    assert exchange.latest_version() == job.config.steps - 1
    assert (rank.paths.export / "model.safetensors").is_file()


def test_recorded_batches_survive_a_stop_without_gap_or_leftover(rank: Rank) -> None:
    first, stop = rank.job("grpo", lr=1e-3, record=True), StopFlag()
    write_batch(rollouts(9), step_file(rank.paths.rollouts, 9))
    RolloutStore(first.attempt.exchange).publish_batch(rollouts(1))

    def stop_after_step_1() -> None:
        while RolloutStore(first.attempt.exchange).latest_version() < 1:
            time.sleep(0.01)
        stop.request()

    thread = threading.Thread(target=stop_after_step_1)
    thread.start()
    assert rank.run(first, stop) is False
    thread.join()
    between = recorded_steps(rank.paths.rollouts)
    write_batch(rollouts(7), step_file(rank.paths.rollouts, 7))
    second = rank.job("grpo", lr=1e-3, record=True)
    exchange = RolloutStore(second.attempt.exchange)
    for step in (2, 3):
        exchange.publish_batch(rollouts(step))
    assert rank.run(second) is True

    assert between == [1]
    assert recorded_steps(rank.paths.rollouts) == [1, 2, 3]
    exchange.publish_batch(rollouts(4))  # removes what was used up
    assert not exchange.batch_path(2).exists()
    for step in (1, 2, 3):
        kept = read_batch(step_file(rank.paths.rollouts, step))
        assert kept.tokens.tolist() == rollouts(step).tokens.tolist()


def test_a_replayed_stage_publishes_and_records_nothing(rank: Rank, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_batch(rollouts(step), step_file(tmp_path / "recorded", step))
    job = rank.job("grpo", lr=1e-3, record=True, replay=str(tmp_path / "recorded"))

    assert rank.run(job) is True

    assert not rank.paths.rollouts.exists()
    assert not list(job.attempt.exchange.iterdir())
    assert recorded_steps(tmp_path / "recorded") == [1, 2, 3]


def test_tokens_that_the_model_does_not_have_are_refused(rank: Rank, tmp_path: Path) -> None:
    batch = rollouts(1)
    batch.tokens[2, 5] = 1000
    write_batch(batch, step_file(tmp_path / "recorded", 1))
    job = rank.job("grpo", lr=1e-3, replay=str(tmp_path / "recorded"))

    with pytest.raises(CannotJudgeError, match="outside of the model's vocabulary"):
        rank.run(job)


@pytest.mark.parametrize("damage", ["cut", "flip", "pickle", "arrays"])
def test_a_damaged_batch_in_the_exchange_ends_the_rank_and_is_named(
    rank: Rank, damage: str
) -> None:
    job = rank.job("grpo", lr=1e-3)
    path = RolloutStore(job.attempt.exchange).batch_path(1)
    write_batch(rollouts(1), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    if damage in ("cut", "flip"):
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    elif damage == "pickle":
        np.savez(path, tokens=np.array([print], dtype=object))
    else:
        np.savez(path, tokens=np.zeros(3))

    with pytest.raises(StorageError, match="cannot be used") as raised:
        rank.run(job)

    assert str(path) in str(raised.value)
    assert raised.value.exit_code == 3
