"""Held-out answers of an engine whose own model cannot generate: by a copy over all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shakedown.core.errors import ConfigError
from shakedown.models import huggingface
from shakedown.training.engines import dtensor_engine
from shakedown.training.engines.base import Generator, TrainEngine
from shakedown.training.engines.sharded_load import give_memory, parameters_on_meta


@contextmanager
def sharded_copy(engine: TrainEngine) -> Iterator[Generator]:
    """(collective) A model of transformers in the training dtype, as FSDP spreads one over all
    ranks, for as long as the block runs: a rank holds its share, and a few weights in the making.

    Raises:
        ConfigError: the engine gives weights under other names than the model's.
    """
    with parameters_on_meta():
        model = huggingface.empty_model(engine.model_config, dtype=engine.torch_dtype)
    model.tie_weights()  # on the meta device each name got a parameter of its own
    mesh = init_device_mesh(engine.device.type, (engine.world_size,))
    if sum(value.numel() for value in model.parameters()) >= dtensor_engine.ONE_UNIT_PARAMETERS:
        for layer in dtensor_engine.decoder_layers(model):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    give_memory(model, engine.device)
    held = {
        name: dtensor_engine.local_part(value.detach()) for name, value in model.named_parameters()
    }
    unfilled = set(held)
    for part in engine.stream(engine.torch_dtype):
        sizes = [{name: value.shape for name, value in part.items() if name in held}]
        dist.broadcast_object_list(sizes, src=0, device=engine.device)
        for name, size in sizes[0].items():
            whole = part.get(name, torch.empty(size if engine.rank else 0))
            whole = whole.to(engine.device, engine.torch_dtype)
            held[name].copy_(distribute_tensor(whole, mesh, [Shard(0)]).to_local())
            unfilled.discard(name)
    if unfilled:  # as of experts, which transformers' modules hold in one weight, its folders apart
        named = ", ".join(sorted(unfilled)[:3])
        raise ConfigError(
            f"held-out rows cannot be answered: {len(unfilled)} weights of transformers' model are "
            f"not among those that the {engine.name} engine gives: {named}",
            hint="set eval_samples to 0 and evaluate the exported model, or train it with fsdp:dN",
        )
    yield Generator(model.eval(), engine.rank, engine.world_size)
