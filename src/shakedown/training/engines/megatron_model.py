"""megatron-core's GPTModel on this rank: process groups, configuration, forward pass."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from shakedown.core.errors import ConfigError
from shakedown.training.batch import TokenBatch
from shakedown.training.conversion import ModelShape, ShardSlice, stage_rules
from shakedown.training.conversion.cuts import WHOLE, vocabulary_rows
from shakedown.training.engines.base import Scores
from shakedown.training.engines.megatron_cpu import (
    Float16Module,
    GPTModel,
    MegatronModule,
    TransformerConfig,
    get_gpt_layer_local_spec,
    parallel_state,
)
from shakedown.training.engines.scoring import Head, kept_columns, score

# The arguments of megatron-core's global groups: t, p and torch's default group. They are one set
# for the process, whatever its engines.
_joined: list[tuple[int, int, Any]] = []


def join_groups(*, t: int, p: int) -> ShardSlice:
    """(collective) Make the groups of t tensor, p pipeline and the data ranks; returns this rank's
    place.
    """
    # An engine of the same sizes, such as a reference model, shares the groups.
    shared = _joined == [(t, p, dist.group.WORLD)]
    if parallel_state.model_parallel_is_initialized() and not shared:
        parallel_state.destroy_model_parallel()  # of an engine before this one
    if not parallel_state.model_parallel_is_initialized():
        _joined[:] = [(t, p, dist.group.WORLD)]
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=t,
            pipeline_model_parallel_size=p,
            create_gloo_process_groups=False,  # for Megatron's own checkpoints, not used here
        )
    return ShardSlice(
        t=parallel_state.get_tensor_model_parallel_rank(),
        ts=t,
        p=parallel_state.get_pipeline_model_parallel_rank(),
        ps=p,
    )


def build_model(shape: ModelShape, place: ShardSlice, *, dtype: torch.dtype, device: Any) -> Any:
    """This place's part of the model; the weights are whatever the memory holds."""
    config = _config(shape, place, dtype=dtype, device=device)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        # Each tensor rank has equally many rows: where they do not divide, the last is padded. What
        # stands there is scored as the least number, and never leaves the rank.
        vocab_size=vocabulary_rows(shape, place.ts) * place.ts,
        max_sequence_length=shape.positions,
        pre_process=place.p == 0,
        post_process=place.p == place.ps - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
    )
    _mark_shards(model, shape, place)
    if device.type != "cpu":
        model.cuda()
    return model if dtype == torch.float32 else Float16Module(config, model)


def unwrapped(model: Any) -> Any:
    """The GPTModel, without the casts around it that half precision needs."""
    return model.module if isinstance(model, Float16Module) else model


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch: no [T, T] scores in memory, and the same code on CPU and GPU."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Query [T, N, heads, width]; key and value have fewer heads. Returns [T, N, columns]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Forward:
    """Runs one stage on micro batches; on the last stage only trained positions are scored."""

    def __init__(self, model: Any, *, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._columns: torch.Tensor | None = None
        self._extent = (0, 0)  # positions and rows of the micro batch in work
        self._inner = unwrapped(model)
        if self._inner.post_process:
            layer = self._inner.output_layer
            layer.register_forward_pre_hook(self._keep)
            layer.forward = _as_it_is

    def __call__(self, wrapped: Any, batch: TokenBatch) -> torch.Tensor:
        """The stage's output: hidden states, on the last stage those [N, C, H] of the kept columns.

        Args:
            wrapped: the model as the schedule holds it (inside of its gradient buffers).

        Raises:
            RuntimeError: the last stage got hidden states of another shape than its own batch.
        """
        tokens = batch.tokens[:, :-1]
        self._columns = kept_columns(batch) - 1
        self._extent = tokens.shape[1], tokens.shape[0]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        # No mask: padding stands after every token that counts, and attention is causal.
        output: torch.Tensor = wrapped(tokens, positions, None)
        return output

    def score(self, output: torch.Tensor, batch: TokenBatch, temperature: float) -> Scores:
        """The last stage's scores of the trained tokens, the same on all tensor ranks."""
        group = parallel_state.get_tensor_model_parallel_group()
        width = self._inner.output_layer.output_size_per_partition
        first = dist.get_rank(group) * width
        # Rows beyond the vocabulary on the last ranks are padding.
        real = max(0, min(width, self._vocabulary - first))
        weight = self._weight()[:real]
        output = output.to(weight.dtype)  # Float16Module gives float32
        head = Head(weight, first=first, group=group if dist.get_world_size(group) > 1 else None)
        return score(output, batch, head, temperature=temperature)

    def _weight(self) -> torch.Tensor:
        inner = self._inner
        if inner.share_embeddings_and_output_weights:
            shared: torch.Tensor = inner.shared_embedding_or_output_weight()
            return shared
        own: torch.Tensor = inner.output_layer.weight
        return own

    def _keep(self, _module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Hidden states are [T, N, H]. The schedule passes any shape: scored by another batch's
        columns they would be wrong log-probabilities, not an error."""
        if args[0].shape[:2] != self._extent:
            raise RuntimeError(
                f"this stage got hidden states of the shape {list(args[0].shape)}, but its micro "
                f"batch has {self._extent[0]} positions in {self._extent[1]} rows: the ranks of "
                "its pipeline hold different batches"
            )
        return (args[0][self._columns], *args[1:])


def _as_it_is(hidden: torch.Tensor, **_kwargs: Any) -> tuple[torch.Tensor, None]:
    """Replaces an output layer's forward pass: `Forward.score` multiplies by its weight."""
    return hidden, None


def _mark_shards(model: Any, shape: ModelShape, place: ShardSlice) -> None:
    """Say which weights are cut over the tensor ranks: the gradient norm counts the others once.

    megatron-core does so only where it also draws the weights.
    """
    parameters = dict(model.named_parameters())
    for rule in stage_rules(shape, place.p, place.ps):
        parameters.pop(rule.ours).tensor_model_parallel = rule.cut is not WHOLE
    if parameters:
        raise ConfigError(f"megatron-core made weights that no rule fills: {sorted(parameters)}")


def _config(shape: ModelShape, place: ShardSlice, *, dtype: torch.dtype, device: Any) -> Any:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head,
        normalization="RMSNorm",
        layernorm_epsilon=shape.epsilon,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=shape.bias,
        add_qkv_bias=shape.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=place.ts,
        pipeline_model_parallel_size=place.ps,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,  # each micro batch is cut to its own longest row
        moe_token_dispatcher_type="alltoall",  # unused, but the other one refuses the line above
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every weight is loaded
        calculate_per_token_loss=True,  # gradients are added over the data ranks, not averaged
        gradient_accumulation_fusion=False,
    )
