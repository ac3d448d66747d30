"""The formulas of GRPO. Pure. Shapes: N sequences, M sampled tokens (rows first)."""

import torch

# TRL and AReaL divide by std + 1e-4 or so: groups of equal rewards then have advantage 0.
STD_EPSILON = 1e-4


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, *, epsilon: float = STD_EPSILON
) -> torch.Tensor:
    """Rewards against their own group: (r - mean) / (std + epsilon), float32 [N].

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; std with Bessel's correction. A group of one
    has nothing to be compared with: its advantage is 0.

    Args:
        rewards: [N].
        groups: int64 [N], equal numbers belong together.
    """
    values = rewards.double()
    _, member, sizes = groups.unique(return_inverse=True, return_counts=True)
    count = sizes.double()
    zeros = torch.zeros_like(count)
    mean = zeros.scatter_add(0, member, values) / count
    centred = values - mean[member]
    variance = zeros.scatter_add(0, member, centred**2) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt()[member] + epsilon)).float()


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
    arXiv 2503.14476, eq. 8). The caller averages over all tokens of the batch, not over sequences
    first (DAPO's token-level loss).

    Returns:
        Loss [M] with gradient, and bool [M]: where the clip cut the gradient off.
    """
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | (
        (ratio > 1.0 + clip_high) & (advantages > 0)
    )
    return loss, clipped


def importance_weights(
    old_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """min(e^(old - engine), cap), [M]: corrects for tokens sampled from another distribution.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"); with stale rollouts it is also the behaviour weight of decoupled
    PPO (arXiv 2110.00641, eq. 2), which AReaL uses.
    """
    return (old_logprobs - engine_logprobs).exp().clamp(max=cap)
