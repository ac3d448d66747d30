"""Training engines by the backend name of an allocation.

Must import without torch: `lint` and `--help` read the tables here and should answer at once.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shakedown.cluster.allocation import parse_allocation
from shakedown.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from shakedown.training.engines.base import TrainEngine

# Backend name -> module:class; the module is imported when a worker builds the engine.
ENGINES: dict[str, str] = {
    "archon": "shakedown.training.engines.fsdp:ArchonEngine",
    "fsdp": "shakedown.training.engines.fsdp:FsdpEngine",
    "megatron": "shakedown.training.engines.megatron:MegatronEngine",
}

# Backend name -> the dimensions of an allocation that it can spread a model over.
DIMENSIONS: dict[str, frozenset[str]] = {
    "archon": frozenset("dtp"),
    "fsdp": frozenset("dt"),
    "megatron": frozenset("dtp"),
}

# Backend name -> the fields of EngineOptions that it has.
OPTIONS: dict[str, frozenset[str]] = {
    "archon": frozenset({"activation_checkpointing"}),
    "fsdp": frozenset({"activation_checkpointing", "compile", "max_tokens_per_micro_batch"}),
    "megatron": frozenset({"distributed_optimizer", "max_tokens_per_micro_batch"}),
}

# Model types whose layers the engines can take apart: Archon's and Megatron's own, and FSDP's over
# `t`. The dense decoders of transformers that have the same parts.
FAMILIES = ("llama", "qwen2", "qwen3")

# Below this many parameters FSDP gathers one unit at once: one collective instead of one per layer.
# That is 100 MB in bfloat16, which a rank then holds whole.
ONE_UNIT_PARAMETERS = 50_000_000
# Bytes that a block's float32 logits may take.
BLOCK_BYTES = 2**29


def pieces_of(size: int) -> int:
    """How many pieces of a block of logits are worked on in float32, one by one.

    In bfloat16 the block has half of `BLOCK_BYTES`, and three pieces are held in the other half: as
    large as they can be, as each is some twenty kernels on a GPU.

    Args:
        size: bytes of a logit in the block.
    """
    return 32 if size >= 4 else 6


def engine_class(allocation: str) -> "type[TrainEngine]":
    """The engine of an allocation such as `fsdp:d2`.

    Raises:
        UsageError: the allocation is not valid.
        ConfigError: no such engine here, or a dimension that it does not have.
    """
    part, *others = parse_allocation(allocation).parts
    if others:
        raise ConfigError(
            f"allocation {allocation!r}: a stage has one training engine, and here are "
            f"{1 + len(others)} parts",
            hint="write the trainer's part alone; the server's is serve.allocation",
        )
    if part.backend not in ENGINES:
        raise ConfigError(
            f"allocation {allocation!r}: no training engine {part.backend!r}"
            f"{did_you_mean(part.backend, ENGINES)}; valid: {', '.join(ENGINES)}"
        )
    if part.experts:
        raise ConfigError(
            f"allocation {allocation!r}: {part.backend} here trains dense models, without experts",
            hint=f"write {part.backend}:d{part.world}",
        )
    sizes = {name: size for name, size in part.dims.items() if size > 1}
    unknown = sorted(set(sizes) - DIMENSIONS[part.backend])
    if unknown:
        raise ConfigError(
            f"allocation {allocation!r}: {part.backend} cannot split over "
            f"{', '.join(unknown)}; it has {', '.join(sorted(DIMENSIONS[part.backend]))}",
            hint=f"write {part.backend}:d{part.world}",
        )
    module, _, name = ENGINES[part.backend].partition(":")
    found: type[TrainEngine] = getattr(importlib.import_module(module), name)
    return found


def engine_sizes(allocation: str) -> Mapping[str, int]:
    """Ranks by dimension of the trainer's allocation.

    Raises:
        UsageError: the allocation is not valid.
    """
    return parse_allocation(allocation).parts[0].dims
