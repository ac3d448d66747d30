"""The only place where megatron-core is imported, and what makes it run without a GPU.

megatron-core names CUDA in three ways that stop it on a CPU, and in no others that an engine
without dropout, sequence or context parallelism meets:

- it asks for `torch.cuda.current_device()` and makes tensors there, or on the device "cuda";
- it moves weights by `.cuda()` and waits by `torch.cuda.synchronize()`;
- it tells precisions apart by `Tensor.type()`, and knows only the names with `torch.cuda.`.

`calls` answers these three for the duration of one call into megatron-core, and puts everything
back. On a GPU, and outside of it, torch is as it was. No arithmetic is touched.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shakedown.core.errors import ConfigError

try:
    with warnings.catch_warnings():
        # That Apex and Transformer Engine are missing; their place is taken by torch's own.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import (
            USING_PYTORCH_OPTIMIZER,
            OptimizerConfig,
            get_megatron_optimizer,
        )
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module, MegatronModule
except ImportError as error:
    raise ConfigError(
        f"the megatron engine needs megatron-core: {error}",
        hint="pip install 'slurm-shakedown[megatron]', or train with fsdp:dN",
    ) from error

__all__ = [
    "USING_PYTORCH_OPTIMIZER",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Float16Module",
    "GPTModel",
    "MegatronModule",
    "OptimizerConfig",
    "TransformerConfig",
    "calls",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "parallel_state",
]

_CPU = torch.device("cpu")
# Makers of tensors that megatron-core calls with a device.
_MAKERS = ("arange", "empty", "ones", "tensor", "zeros")


@contextlib.contextmanager
def calls(device: torch.device) -> Iterator[None]:
    """Everything that is called in megatron-core is called inside of this block.

    On the CPU torch is changed as the module says, until the end of the block. Megatron's advice
    on features that are not used here stays out of the logs.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # megatron-core 0.16 calls torch 2.13's collectives by their old names.
        warnings.filterwarnings("ignore", "`torch.distributed", category=FutureWarning)
        for owner, name, value in _replacements() if device.type == "cpu" else ():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _replacements() -> list[tuple[Any, str, Any]]:
    return [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor),
        (torch.Tensor, "type", _typed(torch.Tensor.type)),
        *((torch, name, _here(getattr(torch, name))) for name in _MAKERS),
    ]


def _here(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, with the CPU in place of the device "cuda"."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return make(*args, **kwargs)

    return made


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type`, whose names are those that megatron-core compares with."""

    @functools.wraps(original)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        if isinstance(found, str) and not found.startswith("torch.cuda."):
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    return named
