"""Models that no rank ever holds whole: spread while they are empty, and filled share by share.

The model is made with its parameters on the meta device, cut and sharded as any other, and only
then given memory. Out of a folder torch's reader takes the slices of each rank from the safetensors
files: a rank holds its share and one slice in the making. Out of another engine (`sharded_copy`,
to answer held-out rows) its weights come one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shakedown.core.errors import ConfigError, UsageError
from shakedown.models import huggingface
from shakedown.training import engines
from shakedown.training.engines.base import Generator, TrainEngine
from shakedown.training.engines.dcp_store import LoadPlanner, first_reason

_PLAIN = frozenset({"F32", "F16", "BF16"})  # what a copy into float32 keeps exactly


def open_model(folder: Path, config: Any) -> Any:
    """The model of a folder, to be spread and then given to `fill`.

    On several ranks its parameters are on the meta device, where the files let each rank read its
    share of them: weights of dense models have the same names and layouts there as in transformers'
    modules. Any other model is read as a whole, on every rank.

    Raises:
        UsageError: missing, unreadable, or its weights do not fit its config.
    """
    huggingface.check_folder(folder)
    if dist.get_world_size() == 1 or getattr(config, "model_type", None) not in engines.FAMILIES:
        return huggingface.read_model(folder)
    model = _outline(config)
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters()}
    return model if holds(folder, wanted) else huggingface.read_model(folder)


def fill(module: nn.Module, named: Mapping[str, Any], folder: Path, device: torch.device) -> None:
    """(collective) Give a spread model's parameters memory, and their values out of the folder.

    Does nothing to a model that was read as a whole.

    Args:
        named: the module's parameters by their names in the folder.

    Raises:
        UsageError: the folder cannot be read.
    """
    if not any(value.is_meta for value in named.values()):
        return
    made = _give_memory(module, device)
    # Detached: they are written in place, which autograd refuses for a parameter.
    state = {name: made[value].detach() for name, value in named.items()}
    try:
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    except (dcp.api.CheckpointException, OSError) as error:
        raise UsageError(f"cannot read the weights of {folder}: {first_reason(error)}") from error


def _give_memory(module: nn.Module, device: torch.device) -> dict[Any, nn.Parameter]:
    """Allocate as `Module.to_empty`, which unties tied weights and loses the values of buffers."""
    made: dict[Any, nn.Parameter] = {}
    for part in module.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            if value not in made:
                made[value] = nn.Parameter(
                    torch.empty_like(value, device=device), requires_grad=value.requires_grad
                )
            part.register_parameter(name, made[value])
        for name, value in list(part.named_buffers(recurse=False)):
            setattr(part, name, value.to(device))
    return made


def holds(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the safetensors files have each wanted weight once, as a plain tensor of that size.

    Only headers are read. False where they cannot be: whoever reads them next says why.
    """
    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as archive:
                for name in archive.keys():  # noqa: SIM118 - not a mapping
                    part = archive.get_slice(name)
                    if name in found or part.get_dtype() not in _PLAIN:
                        return False
                    found[name] = tuple(part.get_shape())
    except (OSError, SafetensorError):
        return False
    return all(found.get(name) == size for name, size in wanted.items())


def _outline(config: Any, **keywords: Any) -> Any:
    """A model whose parameters are on the meta device."""
    with _parameters_on_meta():
        model = huggingface.empty_model(config, **keywords)
    model.tie_weights()  # on the meta device each name got a parameter of its own
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters go there as soon as a module has them; buffers are computed and stay."""
    register = nn.Module.register_parameter

    def put(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None:
            outline = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
            module._parameters[name] = outline

    nn.Module.register_parameter = put
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextmanager
def sharded_copy(engine: TrainEngine) -> Iterator[Generator]:
    """(collective) A model of transformers in the training dtype, as FSDP spreads one over all
    ranks, for as long as the block runs: a rank holds its share, and a few weights in the making.

    For held-out answers of an engine whose own model cannot generate.
    """
    model = _outline(engine.model_config, dtype=engine.torch_dtype)
    mesh = init_device_mesh(engine.device.type, (engine.world_size,))
    if sum(value.numel() for value in model.parameters()) >= engines.ONE_UNIT_PARAMETERS:
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _give_memory(model, engine.device)
    held = {name: local_part(value.detach()) for name, value in model.named_parameters()}
    for part in engine.stream(engine.torch_dtype):
        sizes = [{name: value.shape for name, value in part.items() if name in held}]
        dist.broadcast_object_list(sizes, src=0, device=engine.device)
        for name, size in sizes[0].items():
            whole = part.get(name, torch.empty(size if engine.rank else 0))
            whole = whole.to(engine.device, engine.torch_dtype)
            held[name].copy_(distribute_tensor(whole, mesh, [Shard(0)]).to_local())
    yield Generator(model.eval(), engine.rank, engine.world_size)


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The layers of a causal language model; `layers` in most families, `h` in GPT-2's.

    Of a model that sees, those of its text part (Gemma 3's lie below `language_model`).

    Raises:
        ConfigError: a model that is not made of a list of layers.
    """
    # Not of its children alone: Llama 4's decoder is for transformers the model with its head.
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList):
            return list(module)
    raise ConfigError(
        f"model type {model.config.model_type!r} has no list of decoder layers to be spread, "
        "computed again or compiled one by one",
        hint="train it by a trainer of your own: docs/any-trainer.md",
    )


def local_part(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value
