"""A trainer's own forward pass on one rank against transformers'."""

from pathlib import Path

import pytest
import torch.distributed as dist

from shakedown.config import load_config
from shakedown.consistency.samples import Scored
from shakedown.consistency.score import Reference
from shakedown.core.errors import CannotJudgeError, UsageError
from shakedown.training.demo import write_model
from shakedown.training.forward import last_backend, trainer_scores

CONFIG = Path(__file__).parents[3] / "config" / "config.yaml"
ITEMS = [Scored([1, 4, 5], [6, 7]), Scored([1, 9], [3, 3, 8]), Scored([1], [5])]


@pytest.mark.slow  # builds an engine
@pytest.mark.parametrize("backend", ["fsdp", "archon"])
def test_a_trainer_scores_each_completion_as_transformers_does(
    tmp_path: Path, backend: str
) -> None:
    write_model(tmp_path / "model", seed=0)
    expected = Reference(str(tmp_path / "model"), dtype="float32").score(ITEMS, temperature=0.7)

    found = trainer_scores(backend, str(tmp_path / "model"))(ITEMS, "float32", 0.7)

    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs.logprobs, abs=1e-5)
    assert not dist.is_initialized()


def test_a_trainer_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean 'fsdp'"):
        trainer_scores("fsdpp", "m")


def test_a_hub_name_cannot_be_read_by_a_trainer() -> None:
    with pytest.raises(CannotJudgeError, match="reads a folder"):
        trainer_scores("fsdp", "Qwen/none")(ITEMS, "float32", 1.0)


def test_the_trainer_of_a_config_is_its_last_stage_s() -> None:
    config = load_config(CONFIG)
    stage = config.own_stages[config.order[-1]]
    assert last_backend(config) == stage.allocation.partition(":")[0]
