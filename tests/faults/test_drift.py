"""Real ranks whose engine has other weights than it says: the stage is flagged or stopped."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shakedown.core.outcome import Outcome, judge_outcome
from shakedown.diagnosis.diagnose import diagnose_stage
from shakedown.rollout.batch import RolloutBatch
from shakedown.rollout.reference import reference_logprobs
from shakedown.rollout.store import RolloutStore
from shakedown.training.drift import with_drift
from shakedown.training.stage.job import StageJob
from tests.demo_assets import write_assets
from tests.stage_ranks import GRPO, Stage, rollout_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 3
LIMITS = {"k3": 2e-3, "mean_abs_dlogp": 0.05}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def stage(assets: Path, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(assets, tmp_path / "stage", drift_limits=LIMITS)
    yield stage
    stage.kill_rest()


def _batch(step: int, version: int, weights: Path) -> RolloutBatch:
    """48 sequences whose 144 trained tokens cost what `weights` say."""
    parts = [rollout_batch(10 * step + part) for part in range(4)]
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("tokens", "loss_mask", "logprobs", "rewards")
    }
    logprobs = np.zeros(joined["tokens"].shape, dtype=np.float32)
    for row, tokens in enumerate(joined["tokens"]):
        logprobs[row, 1:] = reference_logprobs(weights, tokens.tolist())
    return RolloutBatch(
        step=step,
        versions=np.full(48, version, dtype=np.int64),
        groups=np.repeat(np.arange(12), 4),
        **{**joined, "logprobs": np.where(joined["loss_mask"], logprobs, 0).astype(np.float32)},
    )


def _engine(job: StageJob, answer: Callable[[int, int], RolloutBatch]) -> threading.Thread:
    """Gives the batch of each step by the oldest weights that may write it, once they are there."""
    store = RolloutStore(job.attempt.exchange)

    def serve() -> None:
        for step in range(1, job.config.steps + 1):
            version = _written_by(job, step)
            while store.latest_version() < version:
                if stop.wait(0.05):
                    return
            store.publish_batch(answer(step, version))

    stop = threading.Event()
    thread = threading.Thread(target=serve)
    thread.stop = stop  # type: ignore[attr-defined]
    thread.start()
    return thread


def _written_by(job: StageJob, step: int) -> int:
    assert job.config.grpo
    return max(0, step - 1 - job.config.grpo.async_level)


def _weights(job: StageJob, version: int) -> Path:
    """Those of a version; no server says that it has loaded newer ones, so that all are kept."""
    if not version:
        return Path(job.model)
    return job.attempt.exchange / "weights" / f"v{version:06d}"


def _run(
    stage: Stage,
    answer: Callable[[StageJob], Callable[[int, int], RolloutBatch]],
    async_level: int = 0,
    *,
    steps: int = STEPS,
    allocation: str = "fsdp:d2",
    **drift: Any,
) -> tuple[StageJob, list[int]]:
    grpo = {**GRPO["grpo"], "async_level": async_level, "drift": drift}
    job = stage.start(
        {**GRPO, "grpo": grpo, "allocation": allocation},
        steps=steps,
        batch_size=12,
        checkpoint_every=1,
    )
    engine = _engine(job, answer(job))
    codes = stage.end()
    engine.stop.set()  # type: ignore[attr-defined]
    engine.join()
    return job, codes


def _faithful(job: StageJob) -> Callable[[int, int], RolloutBatch]:
    return lambda step, version: _batch(step, version, _weights(job, version))


def _deaf(job: StageJob) -> Callable[[int, int], RolloutBatch]:
    """Drops every update of its weights and says that it has them."""
    return lambda step, version: _batch(step, version, Path(job.model))


def _stale(job: StageJob) -> Callable[[int, int], RolloutBatch]:
    """Has the first weights and says so."""
    return lambda step, _: _batch(step, 0, Path(job.model))


def _apart(job: StageJob) -> Callable[[int, int], RolloutBatch]:
    """Its weights are a little off from the first step on."""

    def answer(step: int, version: int) -> RolloutBatch:
        batch = _batch(step, version, _weights(job, version))
        noise = np.random.default_rng(step).normal(0, 0.2, batch.logprobs.shape)
        off = np.where(batch.loss_mask, np.minimum(batch.logprobs + noise, 0), 0)
        return replace(batch, logprobs=off.astype(np.float32))

    return answer


def _mixed(job: StageJob) -> Callable[[int, int], RolloutBatch]:
    """Took new weights within each answer, after its first token."""

    def answer(step: int, version: int) -> RolloutBatch:
        old, new = (_batch(step, v, _weights(job, v)) for v in (version, step - 1))
        versions = np.where(old.loss_mask, version, -1)
        versions[:, 6:] = step - 1
        logprobs = np.where(versions == version, old.logprobs, new.logprobs)
        return replace(old, logprobs=logprobs, token_versions=versions)

    return answer


def _judged(stage: Stage, job: StageJob, state: Any) -> Any:
    outcome = with_drift(Outcome("stage", 1, state, "as its processes ended"), job)
    return judge_outcome(outcome, None, stage.paths.root)


def test_an_engine_that_takes_its_updates_is_within_the_limits(stage: Stage) -> None:
    job, codes = _run(stage, _faithful, action="stop")

    assert codes == [0, 0], stage.log(0)
    rows = stage.rows()
    assert [row["on_policy_tokens"] for row in rows] == [144] * STEPS
    assert max(row["on_policy_k3"] for row in rows) < 1e-9
    verdict = _judged(stage, job, "completed")
    assert (verdict.status, verdict.next) == ("PASS", "")
    assert verdict.findings[1].measured == "3 judged steps, 432 tokens"


def test_an_engine_that_drops_its_updates_stops_the_stage_at_the_first_step_of_new_weights(
    stage: Stage,
) -> None:
    job, codes = _run(stage, _deaf, action="stop")

    assert codes == [1, 1]
    log = stage.log(0)
    assert "DriftError: step 2: trainer and engine differ on tokens of the same weights: k3 " in log
    assert "(limit 0.002), mean_abs_dlogp" in log
    assert "next: shakedown compare --reference transformers:" in log
    rows = stage.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["on_policy_k3"] < 1e-9 < LIMITS["k3"] < rows[1]["on_policy_k3"]
    assert not list(stage.paths.checkpoints.glob("step_000002"))
    verdict = _judged(stage, job, "failed")
    assert verdict.status == "FAIL"
    assert verdict.findings[1].measured.endswith("first above at step 2, in 1 of 2 judged steps")
    assert "does the engine take the new weights" in verdict.findings[1].remedy
    ended = Outcome(
        "stage", 1, "failed", "", "trainer-rank0", {"trainer-rank0": 1, "trainer-rank1": 1}
    )
    told = diagnose_stage(job.attempt.root, ended).extra["diagnosis"]
    assert (told["cause"], told["culprits"]["ranks"]) == ("server_unhealthy", [])


@pytest.mark.exhaustive
def test_an_engine_that_drops_its_updates_is_flagged_and_the_stage_goes_on(stage: Stage) -> None:
    job, codes = _run(stage, _deaf)

    assert codes == [0, 0], stage.log(0)
    assert "drift: step 2: trainer and engine differ" in stage.log(0)
    assert "drift: " not in stage.log(1)
    verdict = _judged(stage, job, "completed")
    assert verdict.status == "WARN"
    assert "first above at step 2, in 2 of 3 judged steps" in verdict.findings[1].measured


@pytest.mark.exhaustive
def test_an_engine_whose_weights_are_a_little_off_stops_the_stage_after_its_patience(
    stage: Stage,
) -> None:
    _, codes = _run(stage, _apart, action="stop", patience=2)

    assert codes == [1, 1]
    assert [row["step"] for row in stage.rows()] == [1, 2]
    assert "above the limits since step 1" in stage.log(0)


@pytest.mark.exhaustive
def test_tokens_that_are_known_to_be_of_older_weights_are_no_drift(stage: Stage) -> None:
    job, codes = _run(stage, _stale, action="stop")

    assert codes == [0, 0], stage.log(0)
    rows = stage.rows()
    assert [row["on_policy_tokens"] for row in rows] == [144, 0, 0]
    assert rows[1]["k3"] > LIMITS["k3"]
    assert "on_policy_k3" not in rows[1]
    assert _judged(stage, job, "completed").status == "PASS"


@pytest.mark.exhaustive
@pytest.mark.parametrize("allocation", ["fsdp:d2", "megatron:d2"])
@pytest.mark.parametrize("async_level", [1, 2])
def test_an_engine_of_older_weights_is_judged_by_those_in_every_step(
    stage: Stage, async_level: int, allocation: str
) -> None:
    job, codes = _run(stage, _faithful, async_level, steps=5, allocation=allocation, action="stop")

    assert codes == [0, 0], stage.log(0)
    rows = stage.rows()
    assert [row["staleness_max"] for row in rows[2:]] == [async_level] * 3
    assert [row["on_policy_tokens"] for row in rows] == [144] * 5
    assert max(row["on_policy_k3"] for row in rows) < 1e-9
    assert min(row["k3"] for row in rows[async_level + 1 :]) > LIMITS["k3"], "staleness"
    assert _judged(stage, job, "completed").findings[1].measured == "5 judged steps, 720 tokens"


@pytest.mark.exhaustive
def test_an_engine_of_older_weights_that_drops_an_update_stops_the_stage(stage: Stage) -> None:
    _, codes = _run(stage, _deaf, 1, steps=5, action="stop")

    assert codes == [1, 1]
    rows = stage.rows()
    assert [row["step"] for row in rows] == [1, 2, 3], "the first of tokens said to be of version 1"
    assert rows[1]["on_policy_k3"] < 1e-9 < LIMITS["k3"] < rows[2]["on_policy_k3"]
    assert "DriftError: step 3: trainer and engine differ on tokens of the same weights: k3 " in (
        stage.log(0)
    )


@pytest.mark.exhaustive
def test_tokens_of_one_answer_are_each_judged_by_the_weights_that_wrote_them(stage: Stage) -> None:
    _, codes = _run(stage, _mixed, 1, action="stop")
    assert codes == [0, 0], stage.log(0)
    assert [row["on_policy_tokens"] for row in stage.rows()] == [144] * STEPS
    assert max(row["on_policy_k3"] for row in stage.rows()) < 1e-9
