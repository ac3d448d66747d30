"""Tokens of older weights, scored by those weights on a real engine of one rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shakedown.config import OptimizerConfig
from shakedown.training.algorithms import past_weights
from shakedown.training.algorithms.grpo import token_batch
from shakedown.training.algorithms.past_weights import PastWeights
from shakedown.training.batch import TokenBatch
from shakedown.training.coordination import Ranks
from shakedown.training.demo import write_model
from shakedown.training.engines.base import TrainEngine
from shakedown.training.engines.fsdp import FsdpEngine
from tests.megatron_ranks import sft_step
from tests.stage_ranks import rollout_batch
from tests.tiny_models import group_of_one

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def engine(folder: Path) -> TrainEngine:
    return FsdpEngine.build(folder, optimizer=OptimizerConfig(lr=0.01), dtype="float32", device=CPU)


def _past(engine: TrainEngine, *, versions: int) -> PastWeights:
    ranks = Ranks(dist.HashStore(), device=CPU, key=b"")
    return PastWeights(engine, ranks, versions=versions, micro_batch_size=5, temperature=0.7)


def _batch(step: int, version: int) -> TokenBatch:
    """12 rows of 3 tokens that this version wrote."""
    return token_batch(rollout_batch(step, version=version), pad=0)


def _score(past: PastWeights, batch: TokenBatch, version: int) -> torch.Tensor:
    return past.score(batch, version, lambda _parts: lambda _index, _run: None)


def _logprobs(engine: TrainEngine, batch: TokenBatch) -> torch.Tensor:
    return engine.logprobs([batch], temperature=0.7)[0]


def test_tokens_are_scored_by_the_version_that_wrote_them_and_the_weights_come_back(
    engine: TrainEngine,
) -> None:
    past, written = _past(engine, versions=2), {}
    for version in range(3):
        written[version] = _logprobs(engine, _batch(4, version))
        _score(past, _batch(version + 1, version), version)
        sft_step(engine)
    before = engine.gather()
    before = {name: value.clone() for name, value in before.items()}

    found = [_score(past, _batch(4, version), 3) for version in (1, 2)]

    for got, version in zip(found, (1, 2), strict=True):
        torch.testing.assert_close(got, written[version], rtol=0, atol=1e-5)
        assert (got - written[0]).abs().max() > 1e-3, "another version says something else"
    after = engine.gather()
    assert all(value.equal(before[name]) for name, value in after.items())


def test_each_token_of_a_row_is_scored_by_its_own_version(engine: TrainEngine) -> None:
    past, whole = _past(engine, versions=2), _batch(3, 0)
    first = _logprobs(engine, whole)
    _score(past, whole, 0)
    sft_step(engine)
    second = _logprobs(engine, whole)
    _score(past, whole, 1)
    sft_step(engine)
    lag = torch.full(whole.tokens.shape, -9)
    lag[:, 5:] = torch.tensor([2, 1, 0])

    found = _score(past, replace(whole, extra={**whole.extra, "lag": lag}), 2).view(12, 3)

    torch.testing.assert_close(found[:, 0], first.view(12, 3)[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[:, 1], second.view(12, 3)[:, 1], rtol=0, atol=1e-5)
    assert found[:, 2].isnan().all(), "the step's own pass scores these"


@pytest.mark.parametrize(
    ("version", "kept"), [(3, [2]), (9, [])], ids=["older than kept", "after a resume"]
)
def test_tokens_of_weights_that_are_gone_are_not_scored(
    engine: TrainEngine, version: int, kept: list[int]
) -> None:
    past = _past(engine, versions=1)
    for known in kept:
        _score(past, _batch(known + 1, known), known)

    assert _score(past, _batch(version + 1, 0), version).isnan().all()


def test_of_many_tokens_rows_are_scored_that_lie_evenly_over_the_batch(
    engine: TrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_weights, "SCORED_TOKENS", 9)
    past: Any = _past(engine, versions=1)
    _score(past, _batch(1, 0), 0)

    found = _score(past, _batch(2, 0), 1).view(12, 3)

    scored = [row for row in range(12) if not found[row].isnan().any()]
    assert scored == [0, 6, 11]
    assert int(found.isnan().sum()) == 36 - 9
