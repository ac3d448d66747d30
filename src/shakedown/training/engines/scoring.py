"""From a model's logits to what a loss sees of a micro batch's trained tokens."""

from typing import Any

import torch
import torch.distributed as dist

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
    if temperature != 1.0:  # spares a copy of float32 [M, V]
        kept = kept / temperature
    each = kept.log_softmax(-1)
    logprobs = each.gather(1, batch.tokens[:, columns][mask][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(each.exp() * each).sum(-1)
    return Scores(logprobs, entropy)


def score_vocabulary_parallel(
    logits: torch.Tensor, chosen: torch.Tensor, *, vocabulary: int, group: Any
) -> Scores:
    """(collective over `group`) Scores of M tokens, where each rank has a part of the vocabulary.

    Args:
        logits: float32 [M, W], this rank's columns: those from rank * W on.
        chosen: int64 [M], token ids.
        vocabulary: columns that exist; what lies beyond on the last ranks is padding.
    """
    logprobs, entropy = _VocabularyParallel.apply(logits, chosen, vocabulary, group)
    return Scores(logprobs, entropy)


class _VocabularyParallel(torch.autograd.Function):  # type: ignore[misc]
    """log softmax at `chosen`; its gradient with respect to the logits is onehot - softmax."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, chosen: torch.Tensor, vocabulary: int, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.shape[1]
        first = dist.get_rank(group) * width
        logits = logits.clone()
        # The least number, not minus infinity: 0 * inf would be NaN in the entropy.
        logits[:, max(0, vocabulary - first) :] = torch.finfo(logits.dtype).min
        highest = logits.amax(1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        local = chosen - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        shifted = logits - highest[:, None]
        weights = shifted.exp()
        # 0 where another rank has the token's column: the sum over the ranks takes it from there.
        picked = shifted.gather(1, local[:, None])[:, 0] * here
        sums = torch.stack([picked, weights.sum(1), (weights * shifted).sum(1)])
        dist.all_reduce(sums, group=group)
        picked, total, weighted = sums
        ctx.save_for_backward(weights / total[:, None], local, here)
        # With x the shifted logits and Z the sum of e^x: H = log Z - sum of x e^x / Z.
        entropy = total.log() - weighted / total
        # Said to autograd, so that `entropy_coef` is refused here and not silently without effect.
        ctx.mark_non_differentiable(entropy)
        return picked - total.log(), entropy

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, _entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, here = ctx.saved_tensors
        found = -softmax
        found.scatter_add_(1, local[:, None], here.to(softmax.dtype)[:, None])
        return found * gradient[:, None], None, None, None
