"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state spread over all ranks.

Over `t` ranks each layer is cut by tensor parallelism beforehand, over `d` FSDP shards the rest.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from shakedown.core.errors import ConfigError
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import OPTIONS, tensor_parallel
from shakedown.training.engines.base import Generator, LossFunction, OnMicroBatch, Scores
from shakedown.training.engines.dcp_store import read_state
from shakedown.training.engines.dtensor_engine import (
    DTensorEngine,
    add_sums,
    decoder_layers,
    local_part,
    squared_norm,
)
from shakedown.training.engines.scoring import kept_columns, score

# What torch.compile calls, by the variable that names another one: Inductor's for CPUs, Triton's.
_COMPILERS = {"CXX": ["g++"], "CC": ["gcc", "clang"]}


class FsdpEngine(DTensorEngine):
    """A causal language model under FSDP2 with AdamW."""

    name = "fsdp"
    available_options = OPTIONS[name]

    def load(self, folder: Path, *, updates: int) -> None:
        """AdamW's own count of updates is part of the state."""
        state = self._state()
        read_state(state, folder)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.updates = updates

    def gather(self) -> dict[str, torch.Tensor]:
        # With both options torch gives the whole to rank 0 alone.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, torch.Tensor] = get_model_state_dict(self._model, options=options)
        return weights

    @contextmanager
    def generator(self) -> Iterator[Generator]:
        """All ranks, by the sharded model itself: no rank ever holds the whole."""
        self._model.eval()
        # Compiled layers would be compiled again for every length of the cache.
        with torch.compiler.set_stance("force_eager"):
            yield Generator(self._model, self.data_rank, self.data_world_size)
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # the root's weights stay gathered after a forward pass

    def _check(self) -> None:
        t = self._sizes["t"]
        tensor_parallel.check(self.model_config, t)
        if self._options.compile and t > 1:
            raise ConfigError(
                f"compile: not together with t{t}: torch.compile fails on tensor-parallel layers",
                hint="set compile to false, or spread the model over d alone",
            )
        if self._options.compile:
            _check_compiler(self.device)

    def _spread(self, model: Any) -> Any:
        if self.world_size == 1 and self.dtype == "float32":
            return model.to(self.device)  # nothing to shard or to cast: hooks would only cost time
        self._shard(model, lambda: decoder_layers(model))
        return model

    def _parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _accumulate(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        temperature: float,
        begin: OnMicroBatch,
    ) -> dict[str, float]:
        totals: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(batches):
            begin(index, batches)
            self._expect(last=index == len(batches) - 1)
            here = batch.to(self.device)
            part = loss(self._score(here, temperature), here, index)
            self._scaled(part).backward()
            add_sums(totals, part)
        return {name: float(value) for name, value in totals.items()}

    def _logprobs(self, batches: Sequence[TokenBatch], temperature: float) -> list[torch.Tensor]:
        return [self._score(b.to(self.device), temperature).logprobs.cpu() for b in batches]

    def _score(self, batch: TokenBatch, temperature: float) -> Scores:
        """Run the model and keep only the positions before trained tokens."""
        # No attention mask: padding stands after every token that counts, and attention is causal.
        logits = self._model(
            input_ids=batch.tokens[:, :-1],
            logits_to_keep=kept_columns(batch) - 1,
            use_cache=False,
        ).logits
        return score(logits, batch, temperature=temperature, entropy_gradient=self.entropy_gradient)

    def _expect(self, *, last: bool) -> None:
        """Whether the next backward pass is the last of this step: only that one communicates."""
        if not isinstance(self._model, FSDPModule):
            return
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        # Only for the root: layers of a large model give their memory back at once.
        self._model.set_reshard_after_backward(last, recurse=False)

    def _squared_norm(self) -> torch.Tensor:
        """Each rank holds a slice of every gradient, or the same as the other tensor ranks."""
        found = [p for p in self._parameters if p.grad is not None]
        cut = [local_part(p.grad) for p in found if not _whole_over_tensor_ranks(p)]
        whole = [local_part(p.grad) for p in found if _whole_over_tensor_ranks(p)]
        # The sum is over all ranks: what the t tensor ranks hold alike would count t times.
        copies = self.world_size // self.data_world_size
        return squared_norm(cut) + squared_norm(whole) / copies

    def _state(self) -> dict[str, Any]:
        """Model and optimizer under the model's own names."""
        weights, moments = get_state_dict(self._model, self._optimizer)
        return {"model": weights, "optimizer": moments}

    def _exporter(self) -> Any:
        """The model itself: it is transformers' own, and a second one would cost its memory."""
        return self._model


def _whole_over_tensor_ranks(parameter: Any) -> bool:
    """Whether every tensor rank holds the same of it, so that a norm must count it once."""
    # Placements are in the order of the mesh: over d by FSDP, then over t.
    return isinstance(parameter, DTensor) and (
        parameter.device_mesh.ndim == 2 and isinstance(parameter.placements[1], Replicate)
    )


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
