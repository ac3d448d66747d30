"""How a weight is spread over tensor-parallel ranks. `take` cuts, `give` puts together again.

Nothing is computed: values are moved, so that both ways are exact in every dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from shakedown.training.conversion.shape import ModelShape

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Cut:
    """A cut of one kind of weight, in both directions.

    Attributes:
        take: (Hugging Face weights, shape, rank, ranks) -> that rank's Megatron weight.
        give: (Megatron weights of all ranks, shape) -> the Hugging Face weights.
    """

    take: Callable[[Tensors, ModelShape, int, int], torch.Tensor]
    give: Callable[[Tensors, ModelShape], list[torch.Tensor]]


def vocabulary_rows(shape: ModelShape, ranks: int) -> int:
    """Rows of the embedding on each rank: the last ones may be padding."""
    return -(-shape.vocabulary // ranks)


def _take_whole(tensors: Tensors, _shape: ModelShape, _rank: int, _ranks: int) -> torch.Tensor:
    return tensors[0]


def _give_whole(shards: Tensors, _shape: ModelShape) -> list[torch.Tensor]:
    return [shards[0]]


def _take_columns(tensors: Tensors, _shape: ModelShape, rank: int, ranks: int) -> torch.Tensor:
    return tensors[0].chunk(ranks, 1)[rank].contiguous()


def _give_columns(shards: Tensors, _shape: ModelShape) -> list[torch.Tensor]:
    return [torch.cat(list(shards), 1)]


def _take_vocabulary(tensors: Tensors, shape: ModelShape, rank: int, ranks: int) -> torch.Tensor:
    rows = vocabulary_rows(shape, ranks)
    whole = tensors[0]
    return pad(whole, (0, 0, 0, rows * ranks - whole.shape[0]))[rank * rows : (rank + 1) * rows]


def _give_vocabulary(shards: Tensors, shape: ModelShape) -> list[torch.Tensor]:
    return [torch.cat(list(shards), 0)[: shape.vocabulary].contiguous()]


def _take_gated(tensors: Tensors, _shape: ModelShape, rank: int, ranks: int) -> torch.Tensor:
    """The gate's rows, then the up projection's, of this rank.

    megatron-core cuts the output of each rank's linear_fc1 in halves: silu(first) x second.
    """
    return torch.cat([tensor.chunk(ranks, 0)[rank] for tensor in tensors])


def _give_gated(shards: Tensors, _shape: ModelShape) -> list[torch.Tensor]:
    halves = [shard.chunk(2, 0) for shard in shards]
    return [torch.cat([half[which] for half in halves]) for which in range(2)]


def _take_qkv(tensors: Tensors, shape: ModelShape, rank: int, ranks: int) -> torch.Tensor:
    """The rank's share: for each key-value head its query heads, the key head, the value head.

    That is how megatron-core's SelfAttention takes the output of linear_qkv apart.
    """
    groups = shape.groups // ranks
    rows = [
        tensor.chunk(ranks, 0)[rank].reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors
    ]
    return torch.cat(rows, 1).flatten(0, 1)


def _give_qkv(shards: Tensors, shape: ModelShape) -> list[torch.Tensor]:
    sizes = [shape.heads // shape.groups * shape.head, shape.head, shape.head]
    fused = torch.cat(list(shards))
    rows = fused.reshape(shape.groups, sum(sizes), *fused.shape[1:])
    return [part.flatten(0, 1) for part in rows.split(sizes, 1)]


WHOLE = Cut(_take_whole, _give_whole)
COLUMNS = Cut(_take_columns, _give_columns)
VOCABULARY = Cut(_take_vocabulary, _give_vocabulary)
GATED = Cut(_take_gated, _give_gated)
QKV = Cut(_take_qkv, _give_qkv)
