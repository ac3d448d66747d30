"""Learning-rate schedules against those of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from shakedown.config import OptimizerConfig
from shakedown.training.engines.base import rate_share

WARMUP, TOTAL, DECAY = 4, 23, 7


def _reference(schedule: Callable[..., Any], **settings: Any) -> list[float]:
    """Shares of transformers' schedule by update; its warm-up begins at 0, ours at 1 / WARMUP."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, rates = schedule(optimizer, num_warmup_steps=WARMUP, **settings), []
    for _ in range(TOTAL):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"schedule": "cosine"},
            _reference(get_cosine_schedule_with_warmup, num_training_steps=TOTAL),
        ),
        (
            {"schedule": "cosine", "min_lr_ratio": 0.1},
            _reference(
                get_cosine_with_min_lr_schedule_with_warmup,
                num_training_steps=TOTAL,
                min_lr_rate=0.1,
            ),
        ),
        (
            {"schedule": "linear"},
            _reference(get_linear_schedule_with_warmup, num_training_steps=TOTAL),
        ),
        (
            {"schedule": "wsd", "decay_steps": DECAY, "min_lr_ratio": 0.2},
            _reference(
                get_wsd_schedule,
                num_decay_steps=DECAY,
                num_training_steps=TOTAL,
                decay_type="linear",
                min_lr_ratio=0.2,
            ),
        ),
        ({}, [1.0] * TOTAL),
    ],
    ids=str,
)
def test_after_the_warm_up_the_rate_is_that_of_transformers(
    settings: dict[str, Any], expected: list[float]
) -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=WARMUP, **settings)

    found = [rate_share(update, optimizer, total=TOTAL) for update in range(TOTAL)]

    assert found[:WARMUP] == [0.25, 0.5, 0.75, 1.0]
    assert found[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-9)
    assert rate_share(TOTAL + 9, optimizer, total=TOTAL) == pytest.approx(
        settings.get("min_lr_ratio", 1.0 if not settings else 0.0)
    )


def test_a_decay_longer_than_the_stage_begins_after_the_warm_up() -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="wsd", decay_steps=99)

    assert [rate_share(update, optimizer, total=6) for update in range(6)] == [
        0.5,
        1,
        1,
        0.75,
        0.5,
        0.25,
    ]


@pytest.mark.parametrize("settings", [{"schedule": "wsd"}, {"decay_steps": 5}])
def test_decay_steps_belong_to_wsd(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="decay_steps"):
        OptimizerConfig(lr=1.0, **settings)
