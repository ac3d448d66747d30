"""The formulas of GRPO. Pure. Shapes: N sequences of T tokens, M trained tokens (rows first).

Every one keeps the precision that it is given. A NaN stays a NaN, so that training stops on it.
"""

from typing import Literal

import torch

AdvantageKind = Literal["group_std", "group_mean"]
LossLevel = Literal["token", "sequence", "constant"]

# TRL and AReaL divide by std + 1e-4 or so: groups of equal rewards then have advantage 0.
STD_EPSILON = 1e-4
# Differences of log-probabilities are cut to this many nats before they are exponentiated, as in
# verl (core_algos, policy loss and low_var_kl): e^20 = 5e8 is still far from float32's end.
# Beyond it the gradient of that token is 0.
LOG_RATIO_BOUND = 20.0


def group_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    *,
    kind: AdvantageKind = "group_std",
    epsilon: float = STD_EPSILON,
) -> torch.Tensor:
    """Rewards against their own group, float32 [N].

    `group_std`: (r - mean) / (std + epsilon), DeepSeekMath (arXiv 2402.03300), section 4.1.2; std
    with Bessel's correction. `group_mean`: r - mean, as in Dr. GRPO (arXiv 2503.20783): the
    division gives groups that are nearly always or never solved more weight than others. A group
    of one has nothing to be compared with: its advantage is 0.

    Args:
        rewards: [N].
        groups: int64 [N], equal numbers belong together.
    """
    # Float32 rewards add up exactly in float64: equal ones have an advantage of exactly 0.
    values = rewards.double()
    _, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    count = sizes.double()
    zeros = torch.zeros_like(count)
    mean = zeros.scatter_add(0, member, values) / count
    centred = values - mean[member]
    if kind == "group_mean":
        return centred.float()
    variance = zeros.scatter_add(0, member, centred**2) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt()[member] + epsilon)).float()


def flat_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Which sequences are of a group whose rewards are all equal, bool [N].

    Their advantages are 0: they teach nothing, and DAPO (arXiv 2503.14476, section 3.2, dynamic
    sampling) leaves them out.
    """
    _, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    start = torch.zeros(len(sizes), dtype=rewards.dtype)
    lowest, highest = (
        start.scatter_reduce(0, member, rewards, how, include_self=False)
        for how in ("amin", "amax")
    )
    return (lowest == highest)[member]


def token_shares(
    mask: torch.Tensor, counted: torch.Tensor, *, level: LossLevel, longest: int = 1
) -> torch.Tensor:
    """The share that each trained token of a sequence has in the batch's loss, float64 [N].

    `token`: 1 / tokens, the mean over all tokens (DAPO, arXiv 2503.14476, section 3.3).
    `sequence`: 1 / (sequences x the sequence's own tokens), the mean of the sequences' means
    (DeepSeekMath, arXiv 2402.03300, eq. 3). `constant`: 1 / (sequences x longest), whatever the
    sequence's own length, which then biases nothing (Dr. GRPO, arXiv 2503.20783, section 3.2 and
    appendix A, listing 1). Sequences without a trained token are not counted
    here, as with verl's seq-mean-token-mean. Shares are of the whole batch: added up over any
    split into ranks and micro batches, they are 1 (`constant`: at most), or 0 when nothing counts.

    Args:
        mask: bool [N, T], the trained tokens.
        counted: bool [N], False for sequences that are to have no part in the loss.
        longest: tokens of an answer at most, for `constant`.
    """
    tokens = mask.sum(1).double() * counted
    present = (tokens > 0).double()
    if level == "token":
        return present / tokens.sum().clamp(min=1)
    if level == "constant":
        return present / (present.sum() * longest).clamp(min=1)
    return present / (tokens * present.sum()).clamp(min=1)


def clipped_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = e^(new - old).

    PPO's clipped objective (arXiv 1707.06347, eq. 7) with DAPO's higher upper bound (clip-higher,
    arXiv 2503.14476, section 3.1). new - old is cut to +-LOG_RATIO_BOUND.

    Returns:
        Loss [M] with gradient, and bool [M]: where the clip cut the gradient off.
    """
    ratio = _bounded(logprobs - old_logprobs).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | (
        (ratio > 1.0 + clip_high) & (advantages > 0)
    )
    return loss, clipped


def sequence_means(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Each token's value replaced by the mean over its sequence, [M] with gradient.

    Of new - old it is the logarithm of GSPO's ratio s = (pi_new(y) / pi_old(y))^(1 / |y|) (Zheng et
    al., arXiv 2507.18071, eq. 7), the same for all tokens of a sequence, which its clip then keeps
    or cuts as a whole (eq. 5).

    Args:
        values: [M].
        rows: int64 [M], the sequence of each token, 0 to `count` - 1.
    """
    sums = values.new_zeros(count).index_add(0, rows, values)
    sizes = values.new_zeros(count).index_add(0, rows, torch.ones_like(values))
    return (sums / sizes.clamp(min=1))[rows]


def importance_weights(
    old_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """min(e^(old - engine), cap), [M]: corrects for tokens sampled from another distribution.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"). `old` being the proximal policy and `engine` the behaviour, it is
    also the behaviour weight of decoupled PPO (arXiv 2110.00641, eq. 2), which AReaL (arXiv
    2505.24298, section 5.2) uses for stale rollouts. AReaL's code leaves tokens above its cap
    out; here they keep the weight `cap`. old - engine is cut to +-LOG_RATIO_BOUND.
    """
    return _bounded(old_logprobs - engine_logprobs).exp().clamp(max=cap)


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Each token's e^d - d - 1 with d = reference - new, [M] with gradient, never negative.

    The k3 estimate of KL(new || reference) (Schulman, "Approximating KL divergence") as GRPO adds
    it to the loss (DeepSeekMath, arXiv 2402.03300, eq. 4). d is cut to +-LOG_RATIO_BOUND.
    """
    difference = _bounded(reference_logprobs - logprobs)
    return torch.expm1(difference) - difference


def _bounded(difference: torch.Tensor) -> torch.Tensor:
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
