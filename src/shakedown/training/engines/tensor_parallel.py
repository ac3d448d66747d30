"""Tensor parallelism of dense transformers models: which module is cut how over `t` ranks.

Megatron's scheme (arXiv:1909.08053): queries, keys, values, gate and up are cut by their output
columns, the projections back by their input rows, so that attention and MLP need one all-reduce
each, forward and backward. Embedding, norms and output head are whole on every rank; each makes the
logits of its part of the words (`OutputHead.gathered`). Every parameter becomes a DTensor over the
mesh, for FSDP to spread it over the data ranks.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shakedown.core.errors import ConfigError

_HEADS = 2  # dimension of the heads in [rows, tokens, heads, width]


def _dense() -> dict[str, ParallelStyle]:
    """Module of a decoder layer -> its cut. Inputs are made DTensors once for all that read them:
    their gradients are summed before the all-reduce.
    """
    whole = Replicate()
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def _with_head_norms() -> dict[str, ParallelStyle]:
    """Each rank normalises its own heads; the norm's weight is whole, its gradient a sum."""
    # torch's style for a norm whose input is cut along one dimension: here the heads stand where
    # its documentation has the sequence.
    heads = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
    return _dense() | {"self_attn.q_norm": heads, "self_attn.k_norm": heads}


# model_type of a config -> how to cut one of its decoder layers.
PLANS = {"llama": _dense, "qwen2": _dense, "qwen3": _with_head_norms}


def check(config: Any, t: int) -> None:
    """Whether a model can be cut over `t` ranks; 1 fits every model.

    Args:
        config: the Hugging Face config.

    Raises:
        ConfigError: no plan for this kind of model, or `t` does not divide it.
    """
    if t == 1:
        return
    kind = getattr(config, "model_type", None)
    if kind not in PLANS:
        raise ConfigError(
            f"allocation: t{t} cannot split model type {kind!r}: tensor parallelism here knows "
            f"{', '.join(sorted(PLANS))}",
            hint="leave t out: spread the model over d alone",
        )
    counts = {
        "key-value heads": config.num_key_value_heads,
        "attention heads": config.num_attention_heads,
        "MLP columns": config.intermediate_size,
    }
    for what, count in counts.items():
        if count % t:
            fitting = [n for n in range(1, t + 1) if not any(c % n for c in counts.values())]
            raise ConfigError(
                f"allocation: t{t} does not divide the model's {count} {what}",
                hint=f"t must be one of {', '.join(map(str, fitting))} (up to {t})",
            )


def apply(model: Any, mesh: DeviceMesh) -> None:
    """Cut a causal language model over a one-dimensional mesh, in place.

    Every rank must hold the same weights: nothing is sent. Embedding, last norm or head may be
    missing (a pipeline stage). Afterwards the model takes and gives plain tensors that are equal
    on all ranks of the mesh; gradients of whole parameters may be partial sums, which FSDP adds.

    Args:
        model: `model.config` and `model.model.layers` as transformers has them.

    Raises:
        ConfigError: as `check`.
    """
    check(model.config, mesh.size())
    if mesh.size() == 1:
        return
    # src_data_rank=None: otherwise torch sends every weight from the mesh's first rank.
    for layer in model.model.layers.children():
        parallelize_module(layer, mesh, PLANS[model.config.model_type](), src_data_rank=None)
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
    for module in list(model.modules()):
        if any(not isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            _replicate(module, mesh, made)


def _replicate(module: nn.Module, mesh: DeviceMesh, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make the parameters of one module whole DTensors; it still takes and gives plain tensors."""
    for name, value in list(module.named_parameters(recurse=False)):
        if value not in made:
            whole = distribute_tensor(value, mesh, [Replicate()], src_data_rank=None)
            made[value] = nn.Parameter(whole, requires_grad=value.requires_grad)
        module.register_parameter(name, made[value])

    def take(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_whole(value, mesh) for value in inputs)

    def give(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output

    module.register_forward_pre_hook(take)
    module.register_forward_hook(give)


def _whole(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
