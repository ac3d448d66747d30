"""GRPO's formulas against an independent computation in float64, written as loops."""

import math

import numpy as np
import pytest
import torch

from shakedown.training.algorithms.mismatch import mismatch_sums
from shakedown.training.algorithms.policy_loss import (
    clipped_loss,
    group_advantages,
    importance_weights,
)
from shakedown.training.algorithms.sft import negative_log_likelihood

DRAW = np.random.default_rng(5)


def test_advantages_are_rewards_against_their_own_group() -> None:
    rewards = DRAW.normal(size=24)
    groups = DRAW.permutation(np.repeat([7, 3, 11], 8))

    got = group_advantages(torch.tensor(rewards), torch.tensor(groups))

    for index in range(24):
        own = [rewards[i] for i in range(24) if groups[i] == groups[index]]
        mean = math.fsum(own) / 8
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / 7)
        assert float(got[index]) == pytest.approx((rewards[index] - mean) / (std + 1e-4), rel=1e-6)


def test_advantages_of_equal_rewards_are_zero() -> None:
    got = group_advantages(torch.full((6,), 0.3), torch.tensor([0, 0, 0, 1, 1, 1]))

    assert got.abs().max() < 1e-3


def test_a_group_of_one_has_no_advantage() -> None:
    got = group_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 5, 5]))

    assert got[0] == 0
    assert got[2] > 0 > got[1]


def _reference_loss(new: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, bounded * advantage)


def test_clipped_loss_and_its_gradient_match_the_definition() -> None:
    new = torch.tensor(DRAW.normal(-1, 0.4, size=200), dtype=torch.float64, requires_grad=True)
    old = torch.tensor(DRAW.normal(-1, 0.4, size=200), dtype=torch.float64)
    advantages = torch.tensor(DRAW.normal(size=200), dtype=torch.float64)

    loss, clipped = clipped_loss(new, old, advantages, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()

    values = zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    for index, (n, o, a) in enumerate(values):
        assert loss[index].item() == pytest.approx(_reference_loss(n, o, a, 0.2, 0.28), rel=1e-9)
        above = _reference_loss(n + 1e-6, o, a, 0.2, 0.28)
        below = _reference_loss(n - 1e-6, o, a, 0.2, 0.28)
        assert new.grad is not None
        assert new.grad[index].item() == pytest.approx((above - below) / 2e-6, abs=1e-4)
        assert bool(clipped[index]) == (new.grad[index].item() == 0.0)
    assert 0 < int(clipped.sum()) < 200


def test_higher_upper_bound_lets_rarer_tokens_grow_further() -> None:
    arguments = (torch.tensor([0.25]), torch.tensor([0.0]), torch.tensor([1.0]))

    _, symmetric = clipped_loss(*arguments, clip_low=0.2, clip_high=0.2)
    _, higher = clipped_loss(*arguments, clip_low=0.2, clip_high=0.3)

    assert symmetric.tolist() == [True]
    assert higher.tolist() == [False]


def test_importance_weights_are_ratios_up_to_the_cap() -> None:
    weights = importance_weights(
        torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([-1.0, -0.5, -9.0]), cap=2.0
    )

    assert weights.tolist() == pytest.approx([1.0, math.exp(-0.5), 2.0])


def test_mismatch_means_match_the_definitions() -> None:
    trainer, engine = DRAW.normal(-2, 1, size=100), DRAW.normal(-2, 1, size=100)

    got = mismatch_sums(torch.tensor(trainer), torch.tensor(engine))

    r = trainer - engine
    assert float(got["k1"]) == pytest.approx(float(np.sum(-r)))
    assert float(got["k3"]) == pytest.approx(float(np.sum(np.exp(r) - r - 1)))
    assert float(got["mean_abs_dlogp"]) == pytest.approx(float(np.sum(np.abs(r))))


def test_equal_log_probabilities_have_no_mismatch() -> None:
    same = torch.randn(50)

    assert all(float(value) == 0.0 for value in mismatch_sums(same, same).values())


def test_likelihood_loss_is_the_same_for_every_split() -> None:
    logprobs = torch.tensor(DRAW.normal(-1, 1, size=30), dtype=torch.float64)

    parts = [negative_log_likelihood(part, 30) for part in logprobs.split([4, 25, 1])]

    assert float(sum(parts)) == pytest.approx(float(-logprobs.mean()))
