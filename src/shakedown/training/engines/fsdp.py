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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
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
from shakedown.training.engines.head import find_head
from shakedown.training.engines.scoring import Head, kept_columns, score_tokens

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

    def stream(self, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        for name, value in self._model.state_dict().items():
            # Non-floating buffers stay what they are.
            found = value.to(dtype) if value.is_floating_point() else value
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            yield {name: whole.to("cpu", copy=True)} if self.rank == 0 else {}

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
        self._head = find_head(model)
        model.scores = self._scores
        if self.world_size == 1 and self.dtype == "float32":
            return model.to(self.device)  # nothing to shard or to cast: hooks would only cost time
        self._shard(model, lambda: decoder_layers(model))
        register_fsdp_forward_method(model, "scores")
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
            part = loss(self._score(batch, temperature), batch.to(self.device), index)
            self._scaled(part).backward()
            add_sums(totals, part)
        return {name: float(value) for name, value in totals.items()}

    def _logprobs(self, batches: Sequence[TokenBatch], temperature: float) -> list[torch.Tensor]:
        return [self._score(batch, temperature).logprobs.cpu() for batch in batches]

    def _score(self, batch: TokenBatch, temperature: float) -> Scores:
        # Of the batch on the host: a mask on a GPU would wait there for all that was begun before.
        columns = kept_columns(batch)
        mask = batch.mask[:, columns]
        chosen = batch.tokens[:, columns][mask]
        places = mask.flatten().nonzero()[:, 0]
        given = (batch.tokens[:, :-1], columns - 1, places, chosen)
        return Scores(*self._model.scores(*(t.to(self.device) for t in given), temperature))

    def _scores(
        self,
        tokens: torch.Tensor,
        columns: torch.Tensor,
        places: torch.Tensor,
        chosen: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's forward pass for FSDP: only positions before trained tokens get logits.

        Plain tensors, as FSDP looks for its hooks' places in what it takes and gives. `places`: of
        the trained tokens among all rows' `columns`, in their order.
        """
        # No attention mask: padding stands after every token that counts, and attention is causal.
        if self._head is None:
            logits = self._model.forward(
                input_ids=tokens, logits_to_keep=columns, use_cache=False
            ).logits
            picked = logits.flatten(0, 1).index_select(0, places)
            return score_tokens(picked, chosen, Head(None), temperature=temperature)
        base = self._model.base_model(input_ids=tokens, use_cache=False)
        hidden = base.last_hidden_state[:, columns].flatten(0, 1).index_select(0, places)
        head = self._head.gathered(self._tensor_ranks)
        return score_tokens(hidden, chosen, head, temperature=temperature)

    def _expect(self, *, last: bool) -> None:
        """Whether the next backward pass is the last of this step: the root is gathered until then.

        Gradients kept for the last one are whole on every rank: 4 bytes a parameter. A model of
        one unit has them whole in each backward pass anyway; units of layers reduce theirs at once.
        """
        if not isinstance(self._model, FSDPModule):
            return
        self._model.set_requires_gradient_sync(last or self._by_layer)
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
