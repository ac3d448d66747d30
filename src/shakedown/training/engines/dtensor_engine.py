"""What FSDP and Archon share: parameters as DTensors, torch's AdamW, and checkpoints by DCP."""

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shakedown.core.errors import ConfigError
from shakedown.models.huggingface import without_noise
from shakedown.training import engines
from shakedown.training.engines import tensor_parallel
from shakedown.training.engines.base import EngineOptions, LossPart, TrainEngine
from shakedown.training.engines.dcp_store import DcpStore
from shakedown.training.engines.sharded_load import fill, open_model
from shakedown.training.engines.snapshot import Snapshot

ONE_UNIT_PARAMETERS = engines.ONE_UNIT_PARAMETERS


class DTensorEngine(TrainEngine):
    """A model of transformers over a mesh of p x d x t ranks; neighbours split single layers, as
    they talk most.
    """

    def snapshot(self) -> Snapshot:
        return self._store.snapshot()

    def _held_weights(self) -> Sequence[torch.Tensor]:
        # What a forward pass gathered is used again by the next one, unless it is freed.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return [local_part(p) for p in self._parameters]

    @abstractmethod
    def _spread(self, model: Any) -> Any:
        """(collective) What of the model is this rank's, over the mesh."""

    @abstractmethod
    def _parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by their names in the model folder."""

    @abstractmethod
    def _state(self) -> Mapping[str, Any]:
        """What this rank writes into a checkpoint."""

    @abstractmethod
    def _squared_norm(self) -> torch.Tensor:
        """This rank's share of the gradient's squared norm: float32 scalars that add up."""

    def _load(self) -> None:
        sizes = self._sizes
        shape = (sizes["p"], sizes["d"], sizes["t"])
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("p", "d", "t"))
        self._mesh = mesh
        self.data_rank, self.data_world_size = mesh.get_local_rank("d"), sizes["d"]
        self._p, self._ps = mesh.get_local_rank("p"), sizes["p"]
        self._leads_tensor_ranks = mesh.get_local_rank("t") == 0
        self._tensor_ranks = mesh.get_group("t") if sizes["t"] > 1 else None
        self._reports = self._leads_tensor_ranks and self._p == self._ps - 1
        # In this order: the options change modules that are not wrapped yet, `_spread` makes new
        # parameters, `fill` gives those on the meta device memory, and AdamW needs the last ones.
        model = without_noise(open_model(self.source, self.model_config))
        _set_options(model, self._options)
        self._model = self._spread(model)
        fill(self._model, self._parameters_by_name(), self.source, self.device)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._settings.lr,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
            fused=True,  # one call instead of one for each sharded parameter
        )
        self._store = DcpStore(self._state)

    def _shard(self, module: Any, layers: Callable[[], Sequence[nn.Module]]) -> None:
        """(collective) Cut a module over `t`, then shard what is left over `d`, in place."""
        if self._mesh["t"].size() > 1:
            # The logits are a view of a DTensor then, and nothing here writes into them; and a
            # weight that is cut twice along its rows is gathered in two steps, by a warning each.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            tensor_parallel.apply(module, self._mesh["t"])
        data = self._mesh["d"]
        # Gradients are summed in float32: in bfloat16 small ones of many ranks would be lost.
        policy = MixedPrecisionPolicy(param_dtype=self.torch_dtype, reduce_dtype=torch.float32)
        self._by_layer = sum(p.numel() for p in module.parameters()) >= ONE_UNIT_PARAMETERS
        if self._by_layer:
            # Several micro batches are on their way through a pipeline's stage: gathering a layer
            # anew for each would cost more than the memory is worth.
            free = self._ps == 1
            for layer in layers():
                fully_shard(layer, mesh=data, mp_policy=policy, reshard_after_forward=free)
        # The root's own parameters are needed again at once, by the backward pass of the head.
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=False)

    def _scaled(self, part: LossPart) -> torch.Tensor:
        """FSDP averages gradients over the data ranks; the parts are meant to be added."""
        return part.loss * self.data_world_size

    def _update(self) -> float:
        norm = self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _clip(self) -> float:
        """Clip by the global norm with one collective, as each rank holds a slice of every one."""
        squares = self._squared_norm().to(self.device)
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        # As torch's clip_grad_norm_, whose 1e-6 keeps a norm of zero from dividing.
        scale = self._settings.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            slices = [local_part(p.grad) for p in self._parameters if p.grad is not None]
            torch._foreach_mul_(slices, scale)
        return norm


def add_sums(totals: dict[str, torch.Tensor], part: LossPart) -> None:
    """Stays on the device: reading a number would wait for each micro batch to be computed."""
    for name, value in part.all_sums().items():
        totals[name] = totals[name] + value if name in totals else value


def squared_norm(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares, float32."""
    return torch.nn.utils.get_total_norm(slices).float() ** 2


def local_part(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


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


def _set_options(model: Any, options: EngineOptions) -> None:
    """Set how a model is computed, in place.

    Raises:
        ConfigError: a model without activation checkpointing.
    """
    if options.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"activation_checkpointing: model type {model.config.model_type!r} has none",
                hint="set activation_checkpointing to false",
            )
        # The kind that torch.utils.checkpoint's documentation recommends.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.compile:
        for layer in decoder_layers(model):
            # The forward alone: hooks of FSDP stay outside. Lengths differ from batch to batch.
            layer.forward = torch.compile(layer.forward, dynamic=True)
