"""Padded token batches and their split over ranks and micro batches. Shapes: N rows, T tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional


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

    def masked(self, name: str) -> torch.Tensor:
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
    """The number of micro batches, the most rows of one, the most tokens of a padded row."""
    shapes = [batch.tokens.shape for batch in batches]
    return len(shapes), max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)


def pad_rows(rows: Sequence[Sequence[int]], trained: Sequence[int], *, pad: int) -> TokenBatch:
    """Make a batch of token lists; of row i the last `trained[i]` tokens are trained."""
    spans = [[(len(row) - count, len(row))] for row, count in zip(rows, trained, strict=True)]
    return pad_spans(rows, spans, pad=pad)


def pad_spans(
    rows: Sequence[Sequence[int]], spans: Sequence[Sequence[tuple[int, int]]], *, pad: int
) -> TokenBatch:
    """Make a batch of token lists; the tokens of `spans[i]`, from, up to, are trained in row i."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, (row, trained) in enumerate(zip(rows, spans, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        for start, end in trained:
            mask[index, start:end] = True
    mask[:, 0] = False  # the first token has nothing to be predicted from
    return TokenBatch(tokens, torch.tensor([len(row) for row in rows]), mask)


def rank_share(
    batch: TokenBatch,
    *,
    rank: int,
    world_size: int,
    micro_batch_size: int | None,
    max_tokens: int | None = None,
) -> list[TokenBatch]:
    """This rank's micro batches, each of rows of like length and cut to its longest row.

    The rows are dealt out by falling length: little of a micro batch is padding, ranks have
    equally much to do, and what needs most memory comes first. Every rank gets equally many micro
    batches (collectives must match): a rank that is short of rows repeats the batch's shortest
    row with nothing to train.

    Args:
        micro_batch_size: rows of a micro batch; None: the rank's whole share.
        max_tokens: instead of it, tokens of a micro batch, see `token_slices`.
    """
    total = batch.tokens.shape[0]
    # Stable: every rank sorts for itself, and rows of one length must come out in the same order.
    by_length = batch.lengths.argsort(descending=True, stable=True)
    if max_tokens is None:
        dealt = _row_slices(total, rank, world_size, micro_batch_size)
    else:
        falling = batch.lengths[by_length].tolist()
        dealt = token_slices(falling, world_size=world_size, budget=max_tokens)[rank::world_size]
    parts = []
    for places in map(torch.tensor, dealt):
        part = take_rows(batch, by_length[places.clamp(max=total - 1)])
        part.mask[places >= total] = False  # of a copy: the global batch stays as it is
        parts.append(part)
    return parts


def join_parts(parts: Sequence[TokenBatch]) -> TokenBatch:
    """One batch of the rows of micro batches, padded with zeros to the longest."""
    width = max(part.tokens.shape[1] for part in parts)

    def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
        if values[0].dim() == 1:
            return torch.cat(list(values))
        return torch.cat([functional.pad(each, (0, width - each.shape[1])) for each in values])

    return TokenBatch(
        joined([part.tokens for part in parts]),
        joined([part.lengths for part in parts]),
        joined([part.mask for part in parts]),
        {name: joined([part.extra[name] for part in parts]) for name in parts[0].extra},
    )


def token_slices(falling: Sequence[int], *, world_size: int, budget: int) -> list[Sequence[int]]:
    """Micro batches of rows of like length that hold at most `budget` tokens, padding included.

    As few as the budget allows, their number a multiple of `world_size`; among those the largest
    one is as small as it can be. Dealt out in turn, ranks run micro batches of like size at the
    same time. Rows in falling order, cut greedily, make the fewest micro batches at any limit; so
    the smallest limit with no more of them is found by halving.

    Args:
        falling: the rows' lengths in tokens, the longest first.

    Returns:
        Places in `falling`, in order. A row over the budget is alone. Where there are too few for
        all ranks, the last ones hold one place behind the last row.
    """
    rounds = -(-len(_cut(falling, budget)) // world_size)
    count = rounds * world_size
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_cut(falling, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    cuts: list[Sequence[int]] = [*_cut(falling, high)]
    return cuts + [[len(falling)]] * (count - len(cuts))


def _cut(falling: Sequence[int], limit: int) -> list[range]:
    """Runs of rows, each as long as its rows times the first one's length allow; at least one."""
    cuts, first = [], 0
    while first < len(falling):
        end = min(first + max(limit // falling[first], 1), len(falling))
        cuts.append(range(first, end))
        first = end
    return cuts


def _row_slices(total: int, rank: int, world_size: int, size: int | None) -> list[Sequence[int]]:
    """This rank's micro batches of `size` rows, every `world_size`-th of all."""
    per_rank = -(-total // world_size)
    places = range(rank, per_rank * world_size, world_size)
    step = size or per_rank
    return [places[start : start + step] for start in range(0, per_rank, step)]


def take_rows(batch: TokenBatch, rows: torch.Tensor) -> TokenBatch:
    """Rows by number, int64, cut to the longest of them."""
    lengths = batch.lengths[rows]
    width = int(lengths.max())
    extra = {
        name: values[rows] if values.dim() == 1 else values[rows, :width]
        for name, values in batch.extra.items()
    }
    return TokenBatch(batch.tokens[rows, :width], lengths, batch.mask[rows, :width], extra)
