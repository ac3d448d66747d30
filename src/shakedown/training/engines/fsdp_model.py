"""Spread a transformers model over a mesh of data and tensor ranks, and set how it is computed."""

import logging
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shakedown.core.errors import ConfigError
from shakedown.training.engines import tensor_parallel
from shakedown.training.engines.base import EngineOptions

# Below this many parameters one unit is gathered at once: one collective instead of one a layer.
ONE_UNIT_PARAMETERS = 50_000_000
# What torch.compile calls, by the variable that names another one: Inductor's for CPUs, Triton's.
_COMPILERS = {"CXX": ["g++"], "CC": ["gcc", "clang"]}


def join_mesh(device: torch.device, sizes: Mapping[str, int] | None) -> DeviceMesh:
    """(collective) The mesh of all ranks, dimensions `d` and `t`; ranks that are neighbours
    share a model. None: all ranks are over the data.

    Raises:
        ConfigError: the sizes are not those of the process group.
    """
    world = dist.get_world_size()
    given = {"d": world} if sizes is None else sizes
    d, t = given.get("d", 1), given.get("t", 1)
    if d * t != world:
        raise ConfigError(
            f"allocation: d{d}t{t} has {d * t} ranks, but {world} run",
            hint="start as many ranks as the allocation has",
        )
    return init_device_mesh(device.type, (d, t), mesh_dim_names=("d", "t"))


def spread(
    model: Any, mesh: DeviceMesh, *, dtype: str, device: torch.device, options: EngineOptions
) -> Any:
    """(collective) Cut a model over `t`, then shard it over `d`, in place.

    Raises:
        ConfigError: the model cannot be cut so, or one of the options cannot be had.
    """
    parameters = sum(p.numel() for p in model.parameters())
    if mesh["t"].size() > 1:
        # The logits are a view of a DTensor then, and nothing here writes into them; and a weight
        # that is cut twice along its rows is gathered in two steps, by a warning each.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        tensor_parallel.apply(model, mesh["t"])
    _set_options(model, options)
    if mesh.size() == 1 and dtype == "float32":
        return model.to(device)  # nothing to shard, nothing to cast: hooks would only cost time
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    if parameters >= ONE_UNIT_PARAMETERS:
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh["d"], mp_policy=policy)
    fully_shard(model, mesh=mesh["d"], mp_policy=policy, reshard_after_forward=False)
    return model


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The layers of a causal language model; `layers` in most families, `h` in GPT-2's.

    Raises:
        ConfigError: a model that is not made of a list of layers.
    """
    for child in model.base_model.children():
        if isinstance(child, nn.ModuleList):
            return list(child)
    raise ConfigError(f"model type {model.config.model_type!r} has no list of decoder layers")


def check_plan(config: Any, t: int, device: torch.device, options: EngineOptions) -> None:
    """Refuse what cannot work before a model is read.

    Raises:
        ConfigError: no way to cut that model over `t` ranks, or to compile it here.
    """
    tensor_parallel.check(config, t)
    if options.compile and t > 1:
        raise ConfigError(
            f"compile: not together with t{t}: torch.compile fails on tensor-parallel layers",
            hint="set compile to false, or spread the model over d alone",
        )
    if options.compile:
        _check_compiler(device)


def whole_over_tensor_ranks(parameter: Any) -> bool:
    """Whether every tensor rank holds the same of it, so that a norm must count it once."""
    return isinstance(parameter, DTensor) and (
        parameter.device_mesh.ndim == 2 and isinstance(parameter.placements[1], Replicate)
    )


def local_part(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def _set_options(model: Any, options: EngineOptions) -> None:
    if options.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"activation_checkpointing: model type {model.config.model_type!r} has none",
                hint="set activation_checkpointing to false",
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.compile:
        for layer in decoder_layers(model):
            # The forward alone: hooks of FSDP stay outside. Lengths differ from batch to batch.
            layer.forward = torch.compile(layer.forward, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    """Whether torch.compile can work here, before a rank fails in the midst of its first step.

    Raises:
        ConfigError: no C++ compiler (for CPUs), or no Triton or C compiler (for GPUs).
    """
    wanted = "CXX" if device.type == "cpu" else "CC"
    names = [os.environ[wanted]] if os.environ.get(wanted) else _COMPILERS[wanted]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"compile: torch.compile needs a compiler on this node, and {' or '.join(names)} is "
            "not found",
            hint=f"install g++, name one in {wanted}, or set compile to false",
        )
