"""From a model's logits to what a loss sees of a micro batch's trained tokens."""

import torch

from shakedown.training.batch import TokenBatch
from shakedown.training.engines.base import Scores


def kept_columns(batch: TokenBatch) -> torch.Tensor:
    """Columns with a trained token; one at least, as the collectives have to match."""
    columns = batch.mask.any(0).nonzero()[:, 0]
    if columns.numel() == 0:
        return torch.ones(1, dtype=torch.int64, device=batch.tokens.device)
    return columns


def score(
    logits: torch.Tensor, batch: TokenBatch, *, temperature: float, entropy_gradient: bool
) -> Scores:
    """Scores of the trained tokens.

    Args:
        logits: [N, C, V], of the C positions before `kept_columns`.
    """
    columns = kept_columns(batch)
    mask = batch.mask[:, columns]
    kept = logits[mask].float()
    if temperature != 1.0:
        kept = kept / temperature
    each = kept.log_softmax(-1)
    logprobs = each.gather(1, batch.tokens[:, columns][mask][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(each.exp() * each).sum(-1)
    return Scores(logprobs, entropy)
