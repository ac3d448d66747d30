"""Padded token batches and their split over ranks and micro batches. Shapes: N rows, T tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences.

    Attributes:
        tokens: int64 [N, T].
        lengths: int64 [N], tokens before the padding.
        mask: bool [N, T], True on the tokens that are trained; never in column 0.
        extra: further tensors of shape [N] or [N, T] by name.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def trained_tokens(self) -> int:
        """How many tokens are trained."""
        return int(self.mask.sum())

    def at_mask(self, name: str) -> torch.Tensor:
        """An extra tensor on the trained tokens, shape [M], rows first."""
        values = self.extra[name]
        if values.dim() == 1:
            values = values[:, None].expand_as(self.mask)
        return values[self.mask]

    def to(self, device: torch.device) -> "TokenBatch":
        """The same batch on a device."""
        moved = {name: values.to(device) for name, values in self.extra.items()}
        return TokenBatch(
            self.tokens.to(device), self.lengths.to(device), self.mask.to(device), moved
        )


def extent(batches: Sequence[TokenBatch]) -> tuple[int, int, int]:
    """How many micro batches, the most rows of one, the most tokens of a row with its padding."""
    shapes = [batch.tokens.shape for batch in batches]
    return len(shapes), max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def pad_rows(rows: Sequence[Sequence[int]], trained: Sequence[int], *, pad: int) -> TokenBatch:
    """Make a batch of token lists; of row i the last `trained[i]` tokens are trained."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, (row, count) in enumerate(zip(rows, trained, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        mask[index, len(row) - count : len(row)] = True
    mask[:, 0] = False  # the first token has nothing to be predicted from
    return TokenBatch(tokens, torch.tensor([len(row) for row in rows]), mask)


def rank_share(
    batch: TokenBatch, *, rank: int, world_size: int, micro_batch_size: int | None
) -> list[TokenBatch]:
    """This rank's micro batches, each of rows of like length and cut to its longest row.

    The rows are dealt out by falling length: little of a micro batch is padding, ranks have
    equally much to do, and what needs most memory comes first. Every rank gets equally many micro
    batches (collectives must match): a rank that is short of rows repeats the batch's shortest
    row with nothing to train.
    """
    total = batch.tokens.shape[0]
    per_rank = -(-total // world_size)
    places = torch.arange(rank, per_rank * world_size, world_size)
    missing = places >= total
    # Stable: every rank sorts for itself, and rows of one length must come out in the same order.
    by_length = batch.lengths.argsort(descending=True, stable=True)
    share = take_rows(batch, by_length[places.clamp(max=total - 1)])
    share.mask[missing] = False  # of a copy: `take_rows` leaves the global batch as it is
    size = micro_batch_size or per_rank
    return [
        take_rows(share, torch.arange(start, min(start + size, per_rank)))
        for start in range(0, per_rank, size)
    ]


def take_rows(batch: TokenBatch, rows: torch.Tensor) -> TokenBatch:
    """Rows by number, int64, cut to the longest of them."""
    lengths = batch.lengths[rows]
    width = int(lengths.max())
    extra = {
        name: values[rows] if values.dim() == 1 else values[rows, :width]
        for name, values in batch.extra.items()
    }
    return TokenBatch(batch.tokens[rows, :width], lengths, batch.mask[rows, :width], extra)
