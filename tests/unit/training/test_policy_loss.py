"""GRPO's formulas against an independent computation in float64, written as loops."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shakedown.training.algorithms.policy_loss import (
    AdvantageKind,
    LossLevel,
    clipped_loss,
    flat_groups,
    group_advantages,
    importance_weights,
    reference_kl,
    token_shares,
)
from shakedown.training.algorithms.policy_update import mismatch
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


def test_advantages_by_the_mean_alone_keep_the_scale_of_the_rewards() -> None:
    rewards = DRAW.normal(size=24) * 7
    groups = DRAW.permutation(np.repeat([7, 3, 11], 8))

    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), kind="group_mean")

    for index in range(24):
        own = [rewards[i] for i in range(24) if groups[i] == groups[index]]
        assert float(got[index]) == pytest.approx(rewards[index] - math.fsum(own) / 8, rel=1e-6)


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_advantages_of_equal_rewards_are_exactly_zero(kind: AdvantageKind) -> None:
    got = group_advantages(torch.full((6,), 0.3), torch.tensor([0, 0, 0, 1, 1, 1]), kind=kind)

    assert got.tolist() == [0.0] * 6


def test_a_group_is_flat_when_all_its_rewards_are_equal_or_it_has_one() -> None:
    rewards = torch.tensor([-1.0, 0.5, 0.25, -1.0, 0.5, 0.5, 3.0])
    groups = torch.tensor([9, 2, 7, 9, 7, 7, 4])

    assert flat_groups(rewards, groups).tolist() == [True, True, False, True, False, False, True]


_MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)


def test_every_token_has_the_same_share_at_token_level() -> None:
    shares = token_shares(_MASK, torch.tensor([True, True, True, True]), level="token")

    assert shares.tolist() == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6], rel=1e-12)


def test_every_sequence_with_tokens_has_the_same_share_at_sequence_level() -> None:
    shares = token_shares(_MASK, torch.tensor([True, True, True, True]), level="sequence")

    assert shares.tolist() == pytest.approx([1 / 6, 1 / 3, 0, 1 / 9], rel=1e-12)
    assert float((shares * _MASK.sum(1)).sum()) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_shares_of_sequences_that_do_not_count_go_to_the_others(level: LossLevel) -> None:
    shares = token_shares(_MASK, torch.tensor([True, False, True, False]), level=level)

    assert shares.tolist() == pytest.approx([1 / 2, 0, 0, 0], rel=1e-12)
    assert not token_shares(_MASK, torch.zeros(4, dtype=torch.bool), level=level).any()


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


def test_a_cap_that_float32_cannot_hold_exactly_is_reached() -> None:
    weights = importance_weights(torch.tensor([3.0]), torch.tensor([-3.0]), cap=1.7)

    assert bool(weights >= 1.7)


def test_kl_to_the_reference_and_its_gradient_match_the_definition() -> None:
    new = torch.tensor(DRAW.normal(-2, 1, size=100), dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(DRAW.normal(-2, 1, size=100), dtype=torch.float64)

    kl = reference_kl(new, reference)
    kl.sum().backward()

    assert new.grad is not None
    for index, (n, r) in enumerate(zip(new.tolist(), reference.tolist(), strict=True)):
        ratio = math.exp(r) / math.exp(n)
        assert kl[index].item() == pytest.approx(ratio - math.log(ratio) - 1, rel=1e-9)
        assert new.grad[index].item() == pytest.approx(1 - ratio, rel=1e-9)
    assert float(kl.detach().min()) >= 0


def _probabilities(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.tensor(DRAW.normal(size=(2, size)), dtype=torch.float64)
    first, second = draws.log_softmax(-1)
    return first, second


def test_kl_to_the_reference_has_the_true_divergence_as_its_mean() -> None:
    new, reference = _probabilities(7)

    expected = math.fsum(
        math.exp(n) * (n - r) for n, r in zip(new.tolist(), reference.tolist(), strict=True)
    )

    assert float((new.exp() * reference_kl(new, reference)).sum()) == pytest.approx(expected)


def test_weights_turn_the_mean_over_the_engines_samples_into_the_trainers() -> None:
    trainer, engine = _probabilities(7)
    values = torch.tensor(DRAW.normal(size=7), dtype=torch.float64)

    weighed = engine.exp() * importance_weights(trainer, engine, cap=1e6) * values

    assert float(weighed.sum()) == pytest.approx(float((trainer.exp() * values).sum()), rel=1e-12)


def _with(function: Callable[..., torch.Tensor], new: float, other: float) -> tuple[float, float]:
    """Value and gradient at one token, in the precision of training."""
    leaf = torch.tensor([new], requires_grad=True)
    value = function(leaf, torch.tensor([other]))
    value.sum().backward()
    assert leaf.grad is not None
    return float(value.detach()), float(leaf.grad)


@pytest.mark.parametrize("advantage", [-30.0, 30.0])
@pytest.mark.parametrize(("new", "other"), [(0.0, -9999.0), (-9999.0, 0.0), (-1e30, 1e30)])
def test_log_probabilities_far_apart_give_finite_losses_and_gradients(
    new: float, other: float, advantage: float
) -> None:
    def clipped(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return clipped_loss(one, two, torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)[0]

    def weight(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return importance_weights(one, two, cap=2.0)

    numbers = [*_with(clipped, new, other), *_with(reference_kl, new, other)]
    numbers += _with(weight, new, other)

    assert all(math.isfinite(number) and abs(number) <= 30 * math.exp(20.1) for number in numbers)


def test_a_log_probability_that_is_no_number_stays_one() -> None:
    nan = torch.tensor([math.nan])

    loss, _ = clipped_loss(nan, torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2)

    assert loss.isnan().all()
    assert reference_kl(nan, torch.zeros(1)).isnan().all()
    assert importance_weights(nan, torch.zeros(1), cap=2.0).isnan().all()


def test_mismatch_matches_the_definitions() -> None:
    trainer, engine = DRAW.normal(-2, 1, size=100), DRAW.normal(-2, 1, size=100)

    got = mismatch(torch.tensor(trainer), torch.tensor(engine))

    pairs = list(zip(trainer.tolist(), engine.tolist(), strict=True))
    ratios = [math.exp(t) / math.exp(g) for t, g in pairs]
    apart = sorted(abs(t - g) for t, g in pairs)
    p, q = ([math.exp(pair[side]) for pair in pairs] for side in (0, 1))
    expected = {
        "k1": _mean([g - t for t, g in pairs]),
        "k3": _mean([r - math.log(r) - 1 for r in ratios]),
        "token_mult_prob_error": _mean([math.exp(each) for each in apart]),
        "mean_abs_dlogp": _mean(apart),
        "max_abs_dlogp": apart[-1],
        # Between the 99th and the 100th of 100 values, one hundredth of the way.
        "p99_abs_dlogp": apart[98] + 0.01 * (apart[99] - apart[98]),
        "mean_abs_dprob": _mean([abs(a - b) for a, b in zip(p, q, strict=True)]),
        "pearson": float(np.corrcoef(p, q)[0, 1]),
        "ess": _mean(ratios) ** 2 / _mean([r * r for r in ratios]),
        "chi2": _mean([r * r for r in ratios]) - 1,
        "extreme_share": _mean([float(max(r, 1 / r) > 2) for r in ratios]),
        "geometric_mean_ratio": math.prod(ratios) ** 0.01,
    }
    assert got == pytest.approx(expected, rel=1e-9)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def test_equal_log_probabilities_have_no_mismatch() -> None:
    same = torch.tensor(DRAW.normal(-2, 1, size=50), dtype=torch.float32)

    got = mismatch(same, same)

    perfect = {"token_mult_prob_error", "pearson", "ess", "geometric_mean_ratio"}
    assert got == pytest.approx({name: float(name in perfect) for name in got}, abs=1e-12)


@pytest.mark.parametrize("engine", [0.0, -9999.0])
def test_mismatch_of_one_token_far_off_is_finite(engine: float) -> None:
    got = mismatch(torch.tensor([-9999.0 - engine, -1.0]), torch.tensor([engine, -1.0]))

    assert got["max_abs_dlogp"] == 100.0
    assert all(math.isfinite(value) for value in got.values())


def test_mismatch_of_a_single_token_and_of_none() -> None:
    assert mismatch(torch.tensor([-1.0]), torch.tensor([-1.5]))["k1"] == -0.5
    assert mismatch(torch.zeros(0), torch.zeros(0)) == {}


def test_likelihood_loss_is_the_same_for_every_split() -> None:
    logprobs = torch.tensor(DRAW.normal(-1, 1, size=30), dtype=torch.float64)

    parts = [negative_log_likelihood(part, 30) for part in logprobs.split([4, 25, 1])]

    assert float(sum(parts)) == pytest.approx(float(-logprobs.mean()))
