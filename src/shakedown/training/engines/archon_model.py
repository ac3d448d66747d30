"""One pipeline stage of a model of transformers: its ranks, layers, forward pass and names."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shakedown.core.errors import ConfigError
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import tensor_parallel
from shakedown.training.engines.scoring import kept_columns

# Models of transformers whose parts are model.embed_tokens, model.layers, model.norm and lm_head,
# and whose layers need nothing but hidden states and positions.
FAMILIES = ("llama", "qwen2", "qwen3")
# Below this many parameters a stage is gathered at once: one collective instead of one a layer.
ONE_UNIT_PARAMETERS = 50_000_000
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def check_model(config: Any, *, t: int, p: int) -> None:
    """Refuse models and cuts that a stage would not compute as transformers does.

    Raises:
        ConfigError: another kind of model, or t or p do not divide it.
    """
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise _unsupported(f"model type {family!r}", f"one of {', '.join(FAMILIES)}")
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise _unsupported("sliding-window attention", "full attention in every layer")
    layers = int(config.num_hidden_layers)
    if layers % p:
        divisors = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ConfigError(
            f"allocation: p{p} does not divide the model's {layers} layers",
            hint=f"p must be one of {divisors}",
        )
    tensor_parallel.check(config, t)


def make_mesh(sizes: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """(collective) The ranks as p x d x t; neighbours split single layers, as they talk most.

    Args:
        sizes: ranks by dimension; what is left out is 1, without any all ranks are over the data.

    Raises:
        ConfigError: the sizes do not multiply to the number of ranks.
    """
    t, p, world = sizes.get("t", 1), sizes.get("p", 1), dist.get_world_size()
    d = sizes.get("d", 1) if sizes else world
    if d * t * p != world:
        raise ConfigError(f"archon:d{d}t{t}p{p} has {d * t * p} ranks, but {world} run")
    return init_device_mesh(device.type, (p, d, t), mesh_dim_names=("p", "d", "t"))


class Stage(nn.Module):  # type: ignore[misc]
    """Consecutive layers; the first stage has the embedding, the last one norm and head.

    Parameters have the names of the whole model, but layers count from 0; see `whole_name`.

    Attributes:
        begin: called with the number of a micro batch before it is computed; returns it.
        finish: logits [N, C, V] of the kept columns and that number -> output of the last stage.
    """

    begin: Callable[[int], TokenBatch]
    finish: Callable[[torch.Tensor, int], torch.Tensor]

    def __init__(self, whole: Any, *, p: int, ps: int) -> None:
        """Takes the model apart: of `whole` only this stage is left."""
        super().__init__()
        self.config = whole.config
        self.is_first, self.is_last = p == 0, p == ps - 1
        decoder = whole.model
        count = len(decoder.layers) // ps
        self._before = p * count
        decoder.layers = decoder.layers[p * count : (p + 1) * count]
        if not self.is_first:
            decoder.embed_tokens = None
        if not self.is_last:
            decoder.norm = nn.Identity()
        self.model = decoder
        self.lm_head = whole.lm_head if self.is_last else None

    def forward(self, inputs: torch.Tensor, *, index: torch.Tensor) -> torch.Tensor:
        """Token ids [N, T] or hidden states [N, T, H] in; hidden states or `finish`'s value out."""
        number = int(index)
        batch = self.begin(number)
        given = "input_ids" if self.is_first else "inputs_embeds"
        # No attention mask: padding stands after every token that counts, and attention is causal.
        hidden: torch.Tensor = self.model(**{given: inputs}, use_cache=False).last_hidden_state
        if self.lm_head is None:
            return hidden
        rows = batch.tokens.shape[0]  # fewer than N, where the schedule's shape is filled up
        return self.finish(self.lm_head(hidden[:rows, kept_columns(batch) - 1]), number)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the whole model; a tied head on its own as the embedding."""
        found = {}
        for name, parameter in self.named_parameters():
            whole = _LAYER.sub(lambda m: f"model.layers.{int(m[1]) + self._before}.", name)
            tied = whole == HEAD and self.config.tie_word_embeddings
            found[EMBEDDING if tied else whole] = parameter
        return found


def stage_of(name: str, *, layers: int, ps: int) -> int:
    """The stage that answers for a parameter of the whole model."""
    found = _LAYER.match(name)
    if found:
        return int(found[1]) // (layers // ps)
    return 0 if name == EMBEDDING else ps - 1


def spread(stage: Stage, mesh: DeviceMesh, *, dtype: str) -> None:
    """(collective) Cut a stage over t, then spread what is left over d, in place."""
    tensor_parallel.apply(stage, mesh["t"])
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    # Several micro batches are on their way through a stage: gathering anew for each would cost
    # more than the memory is worth.
    free = mesh["p"].size() == 1
    if sum(p.numel() for p in stage.parameters()) >= ONE_UNIT_PARAMETERS:
        for layer in stage.model.layers:
            fully_shard(layer, mesh=mesh["d"], mp_policy=policy, reshard_after_forward=free)
    fully_shard(stage, mesh=mesh["d"], mp_policy=policy, reshard_after_forward=False)


def stack_tokens(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """The inputs of all micro batches in one shape, below each other: int64 [count * N, T - 1].

    A pipeline's stages agree on one shape before they run. What is filled up is never scored.
    """
    rows = max(batch.tokens.shape[0] for batch in batches)
    width = max(batch.tokens.shape[1] for batch in batches) - 1
    stacked = batches[0].tokens.new_zeros(len(batches), rows, width)
    for one, batch in zip(stacked, batches, strict=True):
        inputs = batch.tokens[:, :-1]
        one[: inputs.shape[0], : inputs.shape[1]] = inputs
    return stacked.flatten(0, 1)


def _unsupported(found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the archon engine cannot train this model: {found}; expected {expected}",
        hint="train it with fsdp:dN",
    )
