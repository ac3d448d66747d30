"""The Megatron engine for models that only megatron-bridge can describe and convert.

The bridge gives Megatron's configuration and the weights; everything else is the Megatron engine.
Before training its logprobs are compared with transformers': a configuration field that the two
read differently (their versions need not fit) would train another model without any error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open

from shakedown.core.errors import ConfigError, StorageError
from shakedown.core.files import read_object, write_json
from shakedown.models import huggingface
from shakedown.training.batch import TokenBatch, pad_rows
from shakedown.training.conversion import ShardSlice
from shakedown.training.conversion.bridge import (
    configured,
    fill,
    open_bridge,
    refusal,
    whole_weights,
)
from shakedown.training.engines import megatron_cpu as core
from shakedown.training.engines.base import UNREADABLE_HINT
from shakedown.training.engines.megatron import MegatronEngine
from shakedown.training.engines.megatron_model import TorchAttention
from shakedown.training.engines.megatron_state import KINDS, MegatronState, StageSnapshot

FORMAT = "shakedown/megatron-bridge/1"
_MANIFEST = "engine.json"
# Largest mean distance of the probe's logprobs from transformers' in float32. Seen on tiny models:
# 1e-6 in float32 and below 0.02 in bfloat16 where all is right, 0.5 with another rotary base.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_HINT = "train it with fsdp:dN"
_EXPECTED = "expected logprobs"


class BridgedMegatronEngine(MegatronEngine):
    """One rank's part of a model that megatron-bridge brought."""

    @staticmethod
    def read_weights(model: Path, config: Any) -> Mapping[str, torch.Tensor]:
        """The bridge reads the weights; rank 0 holds what transformers says of the probe.

        Computed here, outside of `megatron_cpu.calls`: transformers, first used inside of it, was
        seen to give other logprobs from then on.

        Raises:
            ConfigError: there is no bridge for the model.
        """
        open_bridge(model, config)
        if dist.get_rank():
            return {}
        return {_EXPECTED: _expected(model, _probe(_vocabulary(config)))}

    def snapshot(self) -> "BridgedSnapshot":
        parts = {}
        tensors = {
            f"{kind}.{name}": tensor.cpu().clone()
            for kind in KINDS
            for name, tensor in self._bridged.shards(kind)
        }
        if core.parallel_state.get_data_parallel_rank() == 0:
            parts[_file(self._place)] = tensors
        return BridgedSnapshot(parts, self.updates, self._place)

    def load(self, folder: Path, *, updates: int) -> None:
        """Raises StorageError also where t and p are others than those that wrote it."""
        try:
            _check_manifest(folder, self._place)
            with safe_open(folder / _file(self._place), framework="pt") as stored:
                self._bridged.read(stored)
        except (OSError, SafetensorError, ValueError) as error:
            raise StorageError(
                f"cannot read checkpoint {folder}: {str(error).splitlines()[0]}",
                hint=UNREADABLE_HINT,
            ) from error
        self._bridged.set_updates(updates)
        self.updates = updates

    def gather(self) -> dict[str, torch.Tensor]:
        """In the training dtype: the bridge takes the weights from the model."""
        with core.calls(self.device):
            return whole_weights(self._bridge, self._module, keep=self.rank == 0)

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        huggingface.write_folder(
            _AsGathered(), weights, source=self.source, folder=folder, dtype=self.dtype
        )

    def _prepare(self, sizes: Mapping[str, int]) -> None:
        self._bridge = open_bridge(self.source, self.model_config)
        rows, t = _vocabulary(self.model_config), sizes.get("t", 1)
        if rows % t:  # megatron-bridge pads no weights
            raise ConfigError(
                f"allocation: t{t} does not divide the model's vocabulary of {rows}", hint=_HINT
            )

    def _make_model(self, dtype: torch.dtype) -> Any:
        cpu = self.device.type == "cpu"
        provider = configured(self._bridge, _settings(self._place, dtype, cpu=cpu))
        if not cpu:  # the draws before the weights are loaded
            core.model_parallel_cuda_manual_seed(0)
        half = dtype == torch.bfloat16
        try:
            (model,) = provider.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=cpu, bf16=half, fp16=False
            )
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise refusal("cannot build the model", error) from error
        self._module = model.module if isinstance(model, core.Float16Module) else model
        if not isinstance(self._module, core.GPTModel):
            kind = type(self._module).__name__
            raise ConfigError(f"megatron-bridge made a {kind}; text models only", hint=_HINT)
        fill(self._bridge, self._module)
        return model

    def _make_state(self, module: Any) -> MegatronState:
        self._bridged = _BridgedState(module, self._optimizer, self._place)
        return self._bridged

    def _fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Already done; look whether it is the model that transformers computes."""
        found = self.logprobs([_probe(_vocabulary(self.model_config))])[0].float()
        apart = [0.0]
        if self.rank == 0:
            apart = [float((found - weights[_EXPECTED]).abs().mean())]
        dist.broadcast_object_list(apart, src=0, device=self.device)
        if not apart[0] <= _TOLERANCE[self.dtype]:
            raise ConfigError(
                f"Megatron with megatron-bridge's configuration does not compute what transformers "
                f"does: logprobs are {apart[0]:.2g} apart in the mean",
                hint=f"use the transformers release that megatron-bridge was made for, or {_HINT}",
            )


class _BridgedState(MegatronState):
    """Weights and moments by Megatron's own names, as no rule says what they are made of."""

    def __init__(self, model: Any, optimizer: Any, place: ShardSlice) -> None:
        if len(optimizer.chained_optimizers) != 1:
            raise ConfigError("the model's weights need more than one optimizer", hint=_HINT)
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer.chained_optimizers[0]
        self._place = place

    def shards(self, kind: str) -> list[tuple[str, torch.Tensor]]:
        """(collective over the data ranks) This rank's weights or moments, float32."""
        return [(name, self._read(kind, name)) for name in self._parameters]

    def read(self, stored: Any) -> None:
        """Overwrite all from an open file. Raises ValueError where it does not hold them."""
        keys = set(stored.keys())
        for kind in KINDS:
            for name, parameter in self._parameters.items():
                key = f"{kind}.{name}"
                if key not in keys:
                    raise ValueError(f"{key} is missing")
                tensor = stored.get_tensor(key)
                if tensor.shape != parameter.shape:
                    raise ValueError(f"{key} has size {list(tensor.shape)}")
                self.put(kind, {name: tensor})


@dataclass(frozen=True)
class BridgedSnapshot(StageSnapshot):
    """A tensor and pipeline rank's shards, on its first data rank; readable at the same t and p."""

    place: ShardSlice

    def complete(self, folder: Path) -> None:
        layout = {"t": self.place.ts, "p": self.place.ps}
        write_json(folder / _MANIFEST, {"format": FORMAT, "updates": self.updates, **layout})


class _AsGathered:
    """Stands where a transformers model saves itself: the bridge's names are those of the folder.

    transformers' own saving would convert them once more.
    """

    @staticmethod
    def save_pretrained(folder: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
        save_torch_state_dict(dict(state_dict), folder)


def _settings(place: ShardSlice, dtype: torch.dtype, *, cpu: bool) -> dict[str, Any]:
    """What this engine needs of a provider, as `megatron_model` has it for its own models."""
    found = {
        "tensor_model_parallel_size": place.ts,
        "pipeline_model_parallel_size": place.ps,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",  # the algorithm's loss and no other
        "moe_aux_loss_coeff": 0.0,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": cpu,
    }
    if cpu:  # Transformer Engine's layers need a GPU
        found |= {
            "transformer_layer_spec": _local_layers,
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
        }
    return found


def _local_layers(provider: Any) -> Any:
    spec = core.get_gpt_layer_local_spec(
        num_experts=provider.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=provider.qk_layernorm,
        normalization=provider.normalization,
    )
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return spec


def _vocabulary(config: Any) -> int:
    """Raises ConfigError for a config without one, as of a model with more than text."""
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int):
        raise ConfigError("the model's config has no vocab_size; text models only", hint=_HINT)
    return rows


def _probe(vocabulary: int) -> TokenBatch:
    """Two rows of random tokens, long enough to show rotary frequencies."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (n,), generator=draw).tolist() for n in (48, 64)]
    return pad_rows(rows, (47, 63), pad=0)


def _expected(folder: Path, rows: TokenBatch) -> torch.Tensor:
    """transformers' logprobs of the probe, float32 on the CPU."""
    model = huggingface.read_model(folder).eval()
    with torch.no_grad():
        logprobs = model(rows.tokens[:, :-1]).logits.log_softmax(-1)
    found: torch.Tensor = logprobs.gather(2, rows.tokens[:, 1:, None])[..., 0][rows.mask[:, 1:]]
    return found


def _file(place: ShardSlice) -> str:
    return f"t{place.t}-p{place.p}.safetensors"


def _check_manifest(folder: Path, place: ShardSlice) -> None:
    if not (folder / _MANIFEST).is_file():
        raise ValueError(f"no {_MANIFEST}: it is missing, or another engine wrote the checkpoint")
    found: Mapping[str, Any] = read_object(folder / _MANIFEST, "a Megatron checkpoint")
    if found.get("format") != FORMAT:
        raise ValueError(f"{_MANIFEST} has format {found.get('format')!r}, expected {FORMAT!r}")
    if (found.get("t"), found.get("p")) != (place.ts, place.ps):
        raise ValueError(
            f"t{found.get('t')}p{found.get('p')} wrote it, and t{place.ts}p{place.ps} reads it: "
            "a model of megatron-bridge goes on at the same t and p"
        )
