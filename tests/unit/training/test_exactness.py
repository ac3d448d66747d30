"""Fifty SFT steps in float32, spread over ranks, against plain transformers and AdamW."""

from pathlib import Path

import pytest

from shakedown.training.engines.base import EngineOptions
from tests.exactness import assert_exact, engine_losses, plain_losses, write_model

# Each way to spread a model once; `python -m tests.exactness ALLOCATION...` measures others.
ALLOCATIONS = ["fsdp:d2", "megatron:t2"]
FOUR_RANKS = "fsdp:d2t2"  # two of its steps are in test_fsdp_ranks.py
RECOMPUTED = "archon:p2"
BY_TOKENS = ["fsdp:d2", "megatron:p2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("exactness") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[float]:
    return plain_losses(model)


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, list[float]]:
    recomputed = EngineOptions(activation_checkpointing=True)
    return {
        **engine_losses(model, ALLOCATIONS),
        **engine_losses(model, [RECOMPUTED], options=recomputed),
    }


@pytest.mark.slow
@pytest.mark.parametrize("allocation", [*ALLOCATIONS, RECOMPUTED])
def test_losses_are_those_of_plain_torch(
    found: dict[str, list[float]], expected: list[float], allocation: str
) -> None:
    assert_exact(found[allocation], expected)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_losses_by_a_token_budget_are_those_of_plain_torch(
    model: Path, expected: list[float]
) -> None:
    # Rows have 6 to 14 tokens: micro batches of one to three rows.
    found = engine_losses(model, BY_TOKENS, options=EngineOptions(max_tokens_per_micro_batch=24))

    for allocation in BY_TOKENS:
        assert_exact(found[allocation], expected)


@pytest.mark.exhaustive
def test_losses_of_four_ranks_are_those_of_plain_torch(model: Path, expected: list[float]) -> None:
    assert_exact(engine_losses(model, [FOUR_RANKS])[FOUR_RANKS], expected)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, -1])
def test_a_loss_that_is_apart_is_told(expected: list[float], step: int) -> None:
    wrong = list(expected)
    wrong[step] *= 1.002

    with pytest.raises(AssertionError, match="apart"):
        assert_exact(wrong, expected)
