"""From hidden states to what a loss sees of a micro batch's trained tokens.

The logits of M tokens and V words are never whole in memory: they are made block by block of the
vocabulary, and made again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from shakedown.training.batch import TokenBatch
from shakedown.training.engines import BLOCK_BYTES, pieces_of
from shakedown.training.engines.base import Scores


@dataclass(frozen=True)
class Head:
    """The maker of logits from hidden states: a matrix, and what the model does with its product.

    Attributes:
        weight: [W, H], the rows of words `first` to `first + W`; None: hidden states are logits.
        bias: [W].
        after: from logits [R, C] of any part of the words to the model's, such as a soft cap.
        group: of the ranks that hold the other words; they have the same hidden states.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    first: int = 0
    group: Any = None


def kept_columns(batch: TokenBatch) -> torch.Tensor:
    """Columns with a trained token; one at least, as the collectives have to match."""
    columns = batch.mask.any(0).nonzero()[:, 0]
    if columns.numel() == 0:
        return torch.ones(1, dtype=torch.int64, device=batch.tokens.device)
    return columns


def score(hidden: torch.Tensor, batch: TokenBatch, head: Head, *, temperature: float) -> Scores:
    """(collective over the head's group) Scores of the trained tokens.

    Args:
        hidden: [N, C, H], of the C positions before `kept_columns`.
    """
    columns = kept_columns(batch)
    mask = batch.mask[:, columns]
    chosen = batch.tokens[:, columns][mask]
    return Scores(*score_tokens(hidden[mask], chosen, head, temperature=temperature))


def score_tokens(
    hidden: torch.Tensor, chosen: torch.Tensor, head: Head, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(collective over the head's group) Log-probabilities and entropy, float32 [M] with gradient.

    Beside inputs and gradients it takes 1.2 times `BLOCK_BYTES`, or 1.2 times float32 [M, V] where
    that is less.

    Args:
        hidden: [M, H].
        chosen: int64 [M], numbers of words.
        temperature: that logits are divided by.
    """
    task = _Task(chosen, head, temperature)
    found: tuple[torch.Tensor, torch.Tensor] = _Scored.apply(hidden, head.weight, head.bias, task)
    return found


@dataclass(frozen=True)
class _Task:
    """The inputs of a call that have no gradient."""

    chosen: torch.Tensor
    head: Head
    temperature: float


class _Scored(torch.autograd.Function):  # type: ignore[misc]
    """With z the logits, p = softmax(z) and H the entropy:

    d log p[chosen] / dz = onehot - p and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        task: _Task,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.task, ctx.made = task, None
        sums, blocks = _Sums(task), _blocks(hidden, weight)
        for words in blocks:
            made = _logits(hidden, weight, bias, words)
            sums.add(made, words)
            if len(blocks) == 1 and weight is not None:
                ctx.made = made  # it fits: spares making it again
            del made  # or the next block is made beside it
        logprobs, entropy = sums.found()
        ctx.save_for_backward(hidden, weight, bias, sums.highest, sums.total.log(), entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, highest, logarithm, entropy = ctx.saved_tensors
        head, chosen = ctx.task.head, ctx.task.chosen
        g = torch.zeros_like(highest) if of_logprobs is None else of_logprobs
        gradients = _Gradients(hidden, weight, bias)
        for words in _blocks(hidden, weight):
            made, ctx.made = ctx.made, None
            if made is None:
                made = _logits(hidden, weight, bias, words)
            if weight is None:
                made = made.clone()
            here, local = _local(chosen, words, head.first)
            for rows in _pieces(made):
                # Not of their sum: that would round log p to the precision of the logits.
                x = _final(made[rows], ctx.task)
                x.sub_(highest[rows, None]).sub_(logarithm[rows, None])
                powers = x.exp()
                if of_entropy is None:
                    powers.mul_(-g[rows, None])
                else:
                    x.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(g[rows, None])
                    powers.mul_(x).neg_()
                powers.scatter_add_(1, local[rows, None], (g[rows] * here[rows])[:, None])
                del x
                made[rows] = _before(made[rows], powers.div_(ctx.task.temperature), head)
                del powers
            gradients.add(made, words)
        if head.group is not None and weight is not None:
            dist.all_reduce(gradients.hidden, group=head.group)
        return *gradients.found(), None


class _Sums:
    """Over the words, as their blocks come: of e^x and of x e^x with x = z - highest.

    As flash attention does it (arXiv 2205.14135, section 3.1): a higher logit rescales the sums.
    """

    def __init__(self, task: _Task) -> None:
        self._task = task
        least = torch.finfo(torch.float32).min  # not minus infinity: 0 * inf would be NaN
        self.highest = torch.full(
            task.chosen.shape, least, dtype=torch.float32, device=task.chosen.device
        )
        self.total, self._weighted, self._picked = (
            torch.zeros_like(self.highest) for _ in range(3)
        )

    def add(self, made: torch.Tensor, words: slice) -> None:
        """A block [M, words] of the matrix' product."""
        here, local = _local(self._task.chosen, words, self._task.head.first)
        for rows in _pieces(made):
            x = _final(made[rows], self._task)
            self._picked[rows] += x.gather(1, local[rows, None])[:, 0] * here[rows]
            self._lower(rows, torch.maximum(self.highest[rows], x.amax(1)))
            powers = x.sub_(self.highest[rows, None]).exp()
            self.total[rows] += powers.sum(1)
            self._weighted[rows] += powers.mul_(x).sum(1)
            del x, powers

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(collective over the head's group) Log-probabilities and entropy."""
        group = self._task.head.group
        if group is not None:
            top = self.highest.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            self._lower(slice(None), top)
            sums = torch.stack([self._picked, self.total, self._weighted])
            dist.all_reduce(sums, group=group)
            self._picked, self.total, self._weighted = sums
        # H = log sum e^x - sum of p x.
        logarithm = self.total.log()
        entropy = logarithm - self._weighted / self.total
        return self._picked - self.highest - logarithm, entropy

    def _lower(self, rows: slice, top: torch.Tensor) -> None:
        """Make the sums of x = z - highest those of z - top."""
        change = self.highest[rows] - top
        self._weighted[rows].add_(change * self.total[rows]).mul_(change.exp())
        self.total[rows].mul_(change.exp())
        self.highest[rows] = top


class _Gradients:
    """Gradients of hidden states, weight and bias, summed over blocks of the logits' gradient."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> None:
        self._inputs, self._weight_in = hidden, weight
        # Over the blocks in float32; a block of the weight's gradient is whole at once.
        self.hidden = torch.zeros_like(hidden, dtype=torch.float32) if weight is not None else None
        self._weight = None if weight is None else torch.zeros_like(weight)
        self._bias = None if bias is None else torch.zeros_like(bias)

    def add(self, block: torch.Tensor, words: slice) -> None:
        if self._weight_in is None or self.hidden is None or self._weight is None:
            self.hidden = block
            return
        if block.dtype == torch.float32:
            self.hidden.addmm_(block, self._weight_in[words])
        else:
            self.hidden += block @ self._weight_in[words]
        torch.mm(block.t(), self._inputs, out=self._weight[words])
        if self._bias is not None:
            self._bias[words] = block.sum(0)

    def found(self) -> tuple[torch.Tensor | None, ...]:
        whole = None if self.hidden is None else self.hidden.to(self._inputs.dtype)
        return whole, self._weight, self._bias


def _blocks(hidden: torch.Tensor, weight: torch.Tensor | None) -> list[slice]:
    """Parts of the words whose float32 logits fit into a block."""
    if weight is None:
        return [slice(0, hidden.shape[1])]
    size = max(1, BLOCK_BYTES // (4 * max(1, hidden.shape[0])))
    return [slice(i, min(i + size, len(weight))) for i in range(0, len(weight), size)]


def _pieces(block: torch.Tensor) -> Iterator[slice]:
    rows, words = block.shape
    size = max(1, BLOCK_BYTES // (4 * pieces_of(block.element_size()) * words))
    return (slice(i, i + size) for i in range(0, rows, size))


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, words: slice
) -> torch.Tensor:
    if weight is None:
        return hidden
    return functional.linear(hidden, weight[words], None if bias is None else bias[words])


def _final(made: torch.Tensor, task: _Task) -> torch.Tensor:
    """The logits before softmax, float32, to be written into."""
    after = task.head.after
    logits = made if after is None else after(made)
    x = logits.to(torch.float32, copy=after is None)
    return x.div_(task.temperature) if task.temperature != 1.0 else x


def _before(made: torch.Tensor, gradient: torch.Tensor, head: Head) -> torch.Tensor:
    """The gradient of the matrix' product from that of the model's logits."""
    if head.after is None:
        return gradient
    with torch.enable_grad():
        product = made.detach().requires_grad_()
        logits = head.after(product)
    (found,) = torch.autograd.grad(logits, product, gradient.to(logits.dtype))
    return found


def _local(chosen: torch.Tensor, words: slice, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens are among the words of a block, and their columns there (others': any)."""
    local = chosen - (first + words.start)
    width = words.stop - words.start
    return (local >= 0) & (local < width), local.clamp(0, width - 1)
