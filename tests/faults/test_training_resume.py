"""Real ranks under faults: killed, told to stop, started again, on other numbers of ranks."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shakedown.consistency.compare import METRICS
from shakedown.models import huggingface
from shakedown.monitor.heartbeat import read_heartbeats
from shakedown.rollout.store import RolloutStore
from shakedown.training.stage.job import StageJob
from tests.demo_assets import write_assets
from tests.event_files import points
from tests.measured import without_measured
from tests.stage_ranks import GRPO, SFT, Stage, rollout_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def exhaustive(allocation: str) -> Any:
    return pytest.param(allocation, marks=pytest.mark.exhaustive)


INTERRUPTED = 75
FRESH = ("env",)  # each rank an interpreter of its own, as a stage starts them


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"), train_size=60, heldout_size=4)


@pytest.fixture
def stage(assets: Path, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(assets, tmp_path / "stage")
    yield stage
    stage.kill_rest()


@pytest.fixture(scope="module")
def uninterrupted(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(assets, tmp_path_factory.mktemp("uninterrupted") / "stage")
    assert stage.run(SFT, sinks=["tensorboard"]) == [0, 0], stage.log(0)
    yield stage
    stage.kill_rest()


def _assert_drawn(stage: Stage) -> None:
    """TensorBoard shows every row's loss once."""
    drawn = points(stage.paths.tensorboard, "train/loss")
    assert [step for step, _ in drawn] == [row["step"] for row in stage.rows()]
    losses = [row["loss"] for row in stage.rows()]
    assert [value for _, value in drawn] == pytest.approx(losses, rel=1e-6)


def test_a_stage_writes_rows_evaluations_and_a_model(uninterrupted: Stage) -> None:
    rows = uninterrupted.rows()

    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"sampled_accuracy", "greedy_accuracy"} <= rows[-1].keys()
    huggingface.read_model(uninterrupted.paths.export)
    evals = uninterrupted.paths.attempt(1).evals.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in evals] == [0, 9]
    beats = read_heartbeats(uninterrupted.paths.attempt(1).heartbeats)
    assert [(beat.rank, beat.phase, beat.step) for beat in beats] == [
        (0, "finished", 9),
        (1, "finished", 9),
    ]


def test_the_seconds_of_all_phases_add_up_to_each_step(uninterrupted: Stage) -> None:
    parts = ("wait", "score", "forward_backward", "optimizer", "sync", "checkpoint", "eval")
    for row in uninterrupted.rows():
        added = sum(row[f"{part}_seconds"] for part in (*parts, "other"))
        assert added == pytest.approx(row["step_seconds"], abs=1e-6)
        assert min(row["forward_backward_seconds"], row["optimizer_seconds"]) > 0
        assert 0 < row["memory_gb"] <= row["memory_max_gb"] < 16
        assert row["tokens_per_second"] > 0
    saved = [row["step"] for row in uninterrupted.rows() if row["checkpoint_seconds"] > 0]
    assert saved == [3, 6, 9]
    evaluated = [row["step"] for row in uninterrupted.rows() if row["eval_seconds"] > 0]
    assert evaluated == [9]


def test_rank_0_tells_its_progress_and_tensorboard_draws_it(uninterrupted: Stage) -> None:
    log = uninterrupted.log(0)

    assert "\nstep 1/9 " in log
    assert "\nstep 9/9 " in log
    assert "\nstep " not in uninterrupted.log(1)
    _assert_drawn(uninterrupted)
    accuracies = points(uninterrupted.paths.tensorboard, "train/sampled_accuracy")
    assert [step for step, _ in accuracies] == [0, 9]


# Other texts have other rewards.
_TEXT_AS_A_NUMBER = """
import zlib

def reward(completion, answer):
    return zlib.crc32(completion.encode()) % 1000 / 1000
"""


@pytest.mark.parametrize(
    "allocation", ["fsdp:d2", *map(exhaustive, ["fsdp:t2", "megatron:t2", "archon:d2"])]
)
def test_the_held_out_curve_has_all_its_points_after_a_kill_and_is_the_same_on_every_engine(
    assets: Path, tmp_path: Path, allocation: str
) -> None:
    settings: dict[str, Any] = {"eval_every": 2, "steps": 5, "checkpoint_every": 2}
    (tmp_path / "own.py").write_text(_TEXT_AS_A_NUMBER, encoding="utf-8")
    reward = f"{tmp_path / 'own.py'}:reward"
    alone, stage = (Stage(assets, tmp_path / name, reward=reward) for name in ("one", "two"))
    assert alone.run(SFT, allocation="fsdp:d1", **settings) == [0], alone.log(0)
    fault = {"kind": "kill_rank", "rank": 1, "step": 4}

    stage.run(SFT, allocation=allocation, fault=fault, **settings)
    assert stage.run(SFT, allocation=allocation, **settings) == [0, 0], stage.log(0)

    curves = []
    for each in (alone, stage):
        attempts = map(each.paths.attempt, each.paths.attempt_numbers())
        lines = "".join(attempt.evals.read_text(encoding="utf-8") for attempt in attempts)
        rows = {row["step"]: row for row in map(json.loads, lines.splitlines())}
        assert sorted(rows) == [0, 2, 4, 5]
        for row in rows.values():
            low, high = row["greedy_accuracy_low"], row["greedy_accuracy_high"]
            assert 0 <= low <= row["greedy_accuracy"] <= high <= 1
        curves.append([row["greedy_accuracy"] for row in rows.values()])
    assert curves[0] == curves[1]
    assert len(set(curves[0])) > 1
    assert [row["step"] for row in stage.rows() if "greedy_accuracy" in row] == [2, 4, 5]


def test_only_the_newest_checkpoints_stay(uninterrupted: Stage) -> None:
    names = sorted(path.name for path in uninterrupted.paths.checkpoints.iterdir())

    assert names == ["latest", "step_000006", "step_000009"]


def test_one_rank_has_the_losses_of_two(uninterrupted: Stage, stage: Stage) -> None:
    assert stage.run(SFT, allocation="fsdp:d1", steps=5, micro_batch_size=3) == [0]

    one = [row["loss"] for row in stage.rows()]
    assert one == pytest.approx([row["loss"] for row in uninterrupted.rows()][:5], rel=1e-5)


def test_megatron_has_the_losses_of_fsdp_and_resumes_at_another_layout(
    uninterrupted: Stage, stage: Stage
) -> None:
    changes = {"checkpoint_every": 3, "eval_samples": 0}
    assert stage.run(SFT, allocation="megatron:d1t2", steps=3, **changes) == [0, 0], stage.log(0)
    first = stage.log(0)

    again = stage.run(SFT, allocation="megatron:d1", steps=5, micro_batch_size=3, **changes)

    assert again == [0], stage.log(0)
    assert "megatron: d1 t2 p1" in first
    assert "resuming from step_000003" in stage.log(0)
    for name in ("loss", "entropy", "grad_norm"):
        expected = [row[name] for row in uninterrupted.rows()][:5]
        assert [row[name] for row in stage.rows()] == pytest.approx(expected, rel=1e-4), name


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    uninterrupted: Stage, stage: Stage
) -> None:
    seed = time.time_ns() % 1000
    # The checkpoint of step 3 is whole before that of step 6 is begun; the latter may be or not.
    step = random.Random(seed).choice([8, 9])
    print(f"killed at step {step}, seed {seed}")
    fault = {"kind": "kill_rank", "rank": 1, "step": step}
    first = stage.run(SFT, wrapper=FRESH, fault=fault, sinks=["tensorboard"])
    lost = [row["step"] for row in stage.rows()]

    assert stage.run(SFT, wrapper=FRESH, sinks=["tensorboard"]) == [0, 0], stage.log(0)

    assert first[1] == -signal.SIGKILL
    assert first[0] not in (0, INTERRUPTED)
    resumed = re.search(r"resuming from step_00000([36])$", stage.log(0), re.MULTILINE)
    assert resumed is not None, stage.log(0)
    assert lost[-1] > int(resumed[1]), "rows past the checkpoint have to be there to be dropped"
    assert without_measured(stage.rows()) == without_measured(uninterrupted.rows())
    _assert_drawn(stage)


@pytest.mark.parametrize("allocation", ["fsdp:d2", *map(exhaustive, ["megatron:t2", "archon:d2"])])
def test_a_killed_run_goes_on_with_another_learning_rate_exactly_as_far_as_that_reaches(
    uninterrupted: Stage, stage: Stage, assets: Path, allocation: str
) -> None:
    reference, settings = uninterrupted, {"allocation": allocation, "eval_samples": 0}
    if allocation != SFT["allocation"]:
        reference = Stage(assets, stage.paths.root.parent / "reference")
        assert reference.run(SFT, **settings) == [0, 0], reference.log(0)
    other = SFT["optimizer"] | {"lr": 0.0005, "weight_decay": 0.5, "max_grad_norm": 0.1}
    fault = {"kind": "kill_rank", "rank": 1, "step": 8}

    first = stage.run(SFT, fault=fault, **settings)
    second = stage.run(SFT, optimizer=other, steps=8, **settings)
    again = stage.run(SFT, optimizer=SFT["optimizer"], **settings)

    log = stage.paths.attempt(2).log("trainer-rank0").read_text(encoding="utf-8")
    resumed = re.search(r"resuming from step_00000([36])$", log, re.MULTILINE)
    assert resumed is not None, log
    done = int(resumed[1])
    assert (first[1], second, again) == (-signal.SIGKILL, [0, 0], [0, 0]), log
    found, expected = without_measured(stage.rows()), without_measured(reference.rows())
    assert found[:done] == expected[:done]
    # The step after it still has the weights and the batch of the run that was not killed.
    after, before = found[done], expected[done]
    assert {**after, "lr": 0, "grad_norm": 0} == {**before, "lr": 0, "grad_norm": 0}
    warmed_up = min(1.0, (done + 1) / SFT["optimizer"]["warmup_steps"])
    assert after["grad_norm"] == before["grad_norm"]
    assert after["lr"] == pytest.approx(0.0005 * warmed_up)
    # Then they part.
    assert found[done + 1]["loss"] != expected[done + 1]["loss"]
    assert f"changed after step {done}: steps 9 -> 8, optimizer.lr 0.002 -> 0.0005, " in log
    made = [json.loads(line) for line in stage.paths.provenance.read_text().splitlines()]
    began = [(row["step"], row["attempt"], row["made"]["optimizer.lr"]) for row in made]
    assert began == [(0, "001", "0.002"), (done, "002", "0.0005"), (8, "003", "0.002")]
    assert [row["step"] for row in stage.rows()] == list(range(1, 10))


# A disk that never answers while the checkpoint of step 6 is flushed to it.
_STUCK_DISK = """
import os, time

flush = os.fsync

def fsync(descriptor):
    if ".writing-step_000006" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(3600)
    flush(descriptor)

os.fsync = fsync
"""
# Blocks of 1 kB; a rank's part of the checkpoint is larger, all else is smaller.
_FULL_ON_RANK_1 = '[ "$RANK" = 0 ] || ulimit -f 1000; exec "$@"'


def test_killed_and_full_disks_during_the_write_beside_the_training_lose_nothing(
    uninterrupted: Stage, stage: Stage, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_STUCK_DISK, encoding="utf-8")
    modules = f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    stage.start(SFT, wrapper=("env", modules))
    stage.wait_until(lambda: stage.paths.metrics.exists() and len(stage.rows()) >= 8)
    stage.kill_rest()
    killed = sorted(path.name for path in stage.paths.checkpoints.iterdir())

    stage.start(SFT, wrapper=("bash", "-c", _FULL_ON_RANK_1, "bash"))
    full = stage.end()
    said = stage.log(0)
    kept = sorted(path.name for path in stage.paths.checkpoints.glob("step_*"))
    last = stage.run(SFT)

    # Training went on for two steps and then waited, to write one checkpoint at a time.
    assert killed == [".writing-step_000006", "latest", "step_000003"]
    assert ".writing-step_000006 was cut off before it was whole: removed" in said
    assert full == [3, 3], said
    assert "the checkpoint was not written: rank 1: cannot write" in said
    assert kept == ["step_000003"]
    assert last == [0, 0], stage.log(0)
    assert "resuming from step_000003" in stage.log(0)
    assert without_measured(stage.rows()) == without_measured(uninterrupted.rows())
    saved = [row["step"] for row in stage.rows() if row["checkpoint_seconds"] > 0]
    assert saved == [3, 6, 9]


def test_sigterm_saves_the_step_in_work_and_another_number_of_ranks_goes_on(
    uninterrupted: Stage, stage: Stage
) -> None:
    stage.start(SFT, steps=100_000, checkpoint_every=100_000, eval_samples=0)
    stage.wait_until(lambda: stage.paths.metrics.exists() and len(stage.rows()) >= 3)
    stage.signal(signal.SIGTERM)

    codes = stage.end()
    reached = len(stage.rows())
    again = stage.run(SFT, steps=reached + 2, allocation="fsdp:d1", eval_samples=0)

    assert codes == [INTERRUPTED, INTERRUPTED], stage.log(0)
    assert again == [0], stage.log(0)
    assert f"resuming from step_{reached:06d}" in stage.log(0)
    rows = stage.rows()
    assert [row["step"] for row in rows] == list(range(1, reached + 3))
    compared = list(zip(rows, uninterrupted.rows(), strict=False))
    assert [a["loss"] for a, _ in compared] == pytest.approx(
        [b["loss"] for _, b in compared], rel=1e-4
    )


def test_a_damaged_and_a_foreign_checkpoint_are_not_resumed_from(stage: Stage) -> None:
    assert stage.run(SFT, steps=6, eval_samples=0) == [0, 0]
    shard = next((stage.paths.checkpoints / "step_000006" / "engine").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1  # torch alone would load it without a word
    shard.write_bytes(content)
    assert stage.run(SFT, steps=6, eval_samples=0) == [0, 0]
    damaged = stage.log(0)

    other = SFT["optimizer"] | {"betas": [0.8, 0.9]}
    assert stage.run(SFT, steps=2, eval_samples=0, optimizer=other) == [0, 0]

    assert (
        f"step_000006 ignored: damaged, engine/{shard.name} has changed since it was written"
        in damaged
    )
    assert "resuming from step_000003" in damaged
    assert "optimizer.betas: [0.9, 0.95] there, [0.8, 0.9] here" in stage.log(0)
    assert "starting from the input model" in stage.log(0)
    assert [row["step"] for row in stage.rows()] == [1, 2]
    assert (stage.paths.checkpoints / "foreign-step_000006").is_dir()


def test_a_checkpoint_that_does_not_fit_ends_every_rank_with_a_clear_error(
    stage: Stage,
) -> None:
    stage.start(SFT, eval_samples=0, wrapper=("prlimit", "--fsize=1000000"))

    codes = stage.end()

    assert codes == [3, 3], stage.log(0)
    assert "cannot write checkpoint" in stage.log(0)
    assert "a write was cut short" in stage.log(0)
    assert [row["step"] for row in stage.rows()] == [1, 2, 3]
    assert not list(stage.paths.checkpoints.glob("step_*"))


def test_a_missing_model_is_said_by_every_rank(stage: Stage, tmp_path: Path) -> None:
    broken = Stage(tmp_path / "nowhere", tmp_path / "broken")

    codes = broken.run(SFT)

    assert codes == [2, 2]
    assert "does not exist" in broken.log(0)


def test_grpo_waits_updates_on_batches_and_publishes_weights(stage: Stage) -> None:
    job = stage.start(GRPO)
    exchange = RolloutStore(job.attempt.exchange)
    stage.wait_until(lambda: _waits_for_rollouts(job))
    exchange.publish_batch(rollout_batch(1))
    stage.wait_until(lambda: exchange.latest_version() >= 1)
    weights = exchange.latest_weights()
    assert weights is not None
    published = huggingface.read_model(weights.folder)
    exchange.publish_batch(rollout_batch(2))

    assert stage.end() == [0, 0], stage.log(0)

    first, second = stage.rows()
    assert first["reward_mean"] == pytest.approx(0.25)
    assert (first["staleness_max"], second["staleness_max"]) == (0.0, 1.0)
    assert first["rollout_failed"] == 1.0
    assert first["trained_tokens"] == 36.0
    assert first["k3"] > 0
    assert {*METRICS, "geometric_mean_ratio", "entropy", "clip_fraction"} <= second.keys()
    assert exchange.trainer_finished()
    before = huggingface.read_model(Path(job.model))
    assert _first_token_probability(published) > 2 * _first_token_probability(before)
    assert stage.paths.export.is_dir()


def test_grpo_on_one_rank_in_micro_batches_has_the_rows_of_two(assets: Path, stage: Stage) -> None:
    settings = {
        "loss_level": "sequence",
        "drop_flat_groups": True,
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
    }
    config = GRPO | {"grpo": GRPO["grpo"] | settings}
    other = Stage(assets, stage.paths.root.parent / "other")

    single: dict[str, Any] = {"allocation": "fsdp:d1", "micro_batch_size": 3}
    for each, changes in ((stage, dict[str, Any]()), (other, single)):
        job = each.start(config, **changes)
        for step in (1, 2):
            batch = rollout_batch(step)
            batch.rewards[:4] = 1.0  # a group without signal
            RolloutStore(job.attempt.exchange).publish_batch(batch)
        assert each.end() == [0] * job.world_size, each.log(0)

    two, one = (without_measured(each.rows()) for each in (stage, other))
    assert two[0] == pytest.approx(one[0], rel=1e-5, abs=1e-6)
    assert two[1] == pytest.approx(one[1], rel=5e-3, abs=1e-5)
    assert (two[0]["dropped_share"], two[0]["kl_reference"]) == (pytest.approx(1 / 3), 0.0)
    assert two[1]["kl_reference"] > 0


def test_grpo_on_the_same_rollouts_is_the_same_on_three_pipeline_stages(
    assets: Path, tmp_path: Path
) -> None:
    rows = {}
    for allocation, codes in (("fsdp:d1", [0]), ("megatron:p3", [0, 0, 0])):
        stage = Stage(assets, tmp_path / allocation.replace(":", "-"))
        job = stage.start(GRPO, allocation=allocation, micro_batch_size=5)
        for step in (1, 2):
            RolloutStore(job.attempt.exchange).publish_batch(rollout_batch(step))
        assert stage.end() == codes, stage.log(0)
        rows[allocation] = without_measured(stage.rows())

    assert rows["megatron:p3"] == [pytest.approx(row, rel=1e-4) for row in rows["fsdp:d1"]]


def _waits_for_rollouts(job: StageJob) -> bool:
    beats = read_heartbeats(job.attempt.heartbeats)
    return [beat.phase for beat in beats] == ["rollout_wait", "rollout_wait"]


def _first_token_probability(model: Any) -> float:
    import torch

    prompts = torch.tensor(rollout_batch(1).tokens[:, :5])
    with torch.no_grad():
        return float(model(input_ids=prompts).logits[:, -1].softmax(-1)[:, 70].mean())


def test_grpo_stopped_while_it_waits_saves_and_republishes_its_weights(stage: Stage) -> None:
    job = stage.start(GRPO)
    RolloutStore(job.attempt.exchange).publish_batch(rollout_batch(1))
    stage.wait_until(lambda: stage.paths.metrics.exists() and len(stage.rows()) == 1)
    stage.signal(signal.SIGUSR2)
    codes = stage.end()

    job = stage.start(GRPO)
    exchange = RolloutStore(job.attempt.exchange)
    stage.wait_until(lambda: _waits_for_rollouts(job))
    versions = exchange.latest_version()
    exchange.publish_batch(rollout_batch(2, version=1))

    assert stage.end() == [0, 0], stage.log(0)
    assert codes == [INTERRUPTED, INTERRUPTED]
    assert versions == 1
    assert [row["step"] for row in stage.rows()] == [1, 2]


def test_grpo_without_batches_says_what_it_waits_for(stage: Stage) -> None:
    grpo = GRPO["grpo"] | {"batch_timeout": 11.0}

    codes = stage.run(GRPO, grpo=grpo)

    assert codes == [3, 3]
    assert "Waiting for training batch to arrive (step 1)" in stage.log(0)
    assert "no rollout batch for step 1 within 11 s" in stage.log(0)


def test_grpo_whose_weights_do_not_fit_on_the_disk_publishes_none_and_says_so(
    stage: Stage,
) -> None:
    full_on_rank_0 = _FULL_ON_RANK_1.replace("= 0", "= 1")
    job = stage.start(GRPO, wrapper=("bash", "-c", full_on_rank_0, "bash"))
    exchange = RolloutStore(job.attempt.exchange)
    exchange.publish_batch(rollout_batch(1))

    codes = stage.end()

    assert codes == [3, 3], stage.log(0)
    assert "cannot write" in stage.log(0)
    assert "shakedown: rank 0 failed: StorageError: cannot write" in stage.log(1)
    assert "Traceback" not in stage.log(1)
    assert "Connection" not in stage.log(1)
    assert exchange.latest_weights() is None
    assert not list((job.attempt.exchange / "weights").glob("*v000001*"))
    assert not exchange.trainer_finished()


def test_a_rank_whose_rank_0_is_killed_says_that_it_is_gone(stage: Stage) -> None:
    job = stage.start(GRPO)
    stage.wait_until(lambda: _waits_for_rollouts(job))
    stage.kill(0)

    assert stage.end() == [-signal.SIGKILL, 3]
    assert "rank 0, which coordinates the run, has exited" in stage.log(1)
