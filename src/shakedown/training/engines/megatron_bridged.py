"""The Megatron engine's stage of a model that only megatron-bridge can describe and convert.

The bridge gives Megatron's configuration and the weights; everything else is the Megatron engine.
Before training its logprobs are compared with transformers': a configuration field that the two
read differently (their versions need not fit) would train another model without any error.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open

from shakedown.core.errors import ConfigError
from shakedown.models import huggingface
from shakedown.training.batch import TokenBatch, pad_rows
from shakedown.training.conversion import ShardSlice
from shakedown.training.conversion.bridge import (
    REFUSALS,
    configured,
    fill,
    open_bridge,
    refusal,
    whole_weights,
)
from shakedown.training.engines import megatron_cpu
from shakedown.training.engines.megatron_model import TorchAttention, unwrapped
from shakedown.training.engines.megatron_stage import (
    KINDS,
    Logprobs,
    MegatronStage,
    StageSnapshot,
    stored_tensor,
)

# Largest mean distance of the probe's logprobs from transformers' in float32. Seen on tiny models:
# 1e-6 in float32 and below 0.02 in bfloat16 where all is right, 0.5 with another rotary base.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_HINT = "train it with fsdp:dN"


class BridgedStage(MegatronStage):
    """One rank's part of a model that megatron-bridge brought.

    On disk each tensor and pipeline rank's shards have Megatron's own names, as no rule says what
    they are made of: engine.json (format, updates, t, p) and t0-p0.safetensors ..., each written by
    its first data rank. They can be read at the same t and p only.
    """

    FORMAT = "shakedown/megatron-bridge/1"

    def check(self, sizes: Mapping[str, int]) -> None:
        self._bridge = open_bridge(self.source, self.config)
        self._vocabulary = _vocabulary(self.config)
        t = sizes["t"]
        if self._vocabulary % t:  # megatron-bridge pads no weights
            raise ConfigError(
                f"allocation: t{t} does not divide the model's vocabulary of {self._vocabulary}",
                hint=_HINT,
            )

    def read_source(self) -> None:
        """The bridge reads the weights; rank 0 holds what transformers says of the probe."""
        if dist.get_rank() == 0:
            self._expected = _expected(self.source, _probe(self._vocabulary))

    def fill(self, optimizer: Any) -> None:
        """`build` filled the model."""
        # Megatron makes a second one for experts that are spread over ranks; `_held` knows one.
        if len(optimizer.chained_optimizers) != 1:
            raise ConfigError("the model's weights need more than one optimizer", hint=_HINT)
        super().fill(optimizer)

    def verify(self, logprobs: Logprobs) -> None:
        found = logprobs([_probe(self._vocabulary)])[0].float()
        # Rank 0 alone holds transformers' answer; all have to refuse together.
        apart = [0.0]
        if dist.get_rank() == 0:
            apart = [float((found - self._expected).abs().mean())]
        dist.broadcast_object_list(apart, src=0, device=self.device)
        if not apart[0] <= _TOLERANCE[self.dtype]:  # also where it is NaN
            raise ConfigError(
                f"Megatron with megatron-bridge's configuration does not compute what transformers "
                f"does: logprobs are {apart[0]:.2g} apart in the mean",
                hint=f"use the transformers release that megatron-bridge was made for, or {_HINT}",
            )

    def snapshot(self, *, updates: int) -> StageSnapshot:
        tensors = {  # on all data ranks, as reading takes a collective of them
            f"{kind}.{name}": self._read(kind, name).cpu().clone()
            for kind in KINDS
            for name in self._parameters
        }
        leads = megatron_cpu.parallel_state.get_data_parallel_rank() == 0
        layout = {"t": self.place.ts, "p": self.place.ps}
        return StageSnapshot(
            {_file(self.place): tensors} if leads else {},
            {"format": self.FORMAT, "updates": updates, **layout},
        )

    def stream(self, _dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        """In the training dtype: the bridge takes the weights from the model, one at a time."""
        exported = whole_weights(self._bridge, self._module)
        while True:
            with megatron_cpu.calls(self.device):  # not while the caller has the weight
                name, value = next(exported, ("", torch.empty(0)))
            if not name:
                return
            yield {name: value.detach().clone()} if dist.get_rank() == 0 else {}

    def exporter(self) -> Any:
        return _AsGathered()

    def _make(self) -> Any:
        cpu = self.device.type == "cpu"
        provider = configured(self._bridge, _settings(self.place, self.dtype, cpu=cpu))
        if not cpu:  # the draws before the weights are loaded
            megatron_cpu.model_parallel_cuda_manual_seed(0)
        half = self.dtype == torch.bfloat16
        try:
            (model,) = provider.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=cpu, bf16=half, fp16=False
            )
        except REFUSALS as error:
            raise refusal("cannot build the model", error) from error
        module = unwrapped(model)
        if not isinstance(module, megatron_cpu.GPTModel):
            kind = type(module).__name__
            raise ConfigError(f"megatron-bridge made a {kind}; text models only", hint=_HINT)
        fill(self._bridge, module)  # before the optimizer, which copies them into float32
        return model

    def _check_manifest(self, folder: Path) -> Mapping[str, Any]:
        found = super()._check_manifest(folder)
        place = self.place
        if (found.get("t"), found.get("p")) != (place.ts, place.ps):
            raise ValueError(
                f"t{found.get('t')}p{found.get('p')} wrote it, and t{place.ts}p{place.ps} reads "
                "it: a model of megatron-bridge goes on at the same t and p"
            )
        return found

    def _load(self, folder: Path) -> None:
        with safe_open(folder / _file(self.place), framework="pt") as stored:
            for kind in KINDS:
                for name, parameter in self._parameters.items():
                    self._put(kind, name, stored_tensor(stored, kind, name, parameter.shape))


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
    spec = megatron_cpu.get_gpt_layer_local_spec(
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
