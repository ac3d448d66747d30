"""Log-probabilities and entropy from logits whose vocabulary is spread over ranks."""

from typing import Any

import torch
import torch.distributed as dist

from shakedown.training.engines.base import Scores


def score_logits(
    logits: torch.Tensor, chosen: torch.Tensor, *, vocabulary: int, group: Any
) -> Scores:
    """(collective over `group`) Scores of M tokens.

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
        picked = shifted.gather(1, local[:, None])[:, 0] * here
        sums = torch.stack([picked, weights.sum(1), (weights * shifted).sum(1)])
        dist.all_reduce(sums, group=group)
        picked, total, weighted = sums
        ctx.save_for_backward(weights / total[:, None], local, here)
        entropy = total.log() - weighted / total
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
