"""One pipeline stage of a model of transformers: its layers, forward pass, names and state.

In a checkpoint everything has its Hugging Face name and full size (weight.NAME, exp_avg.NAME,
exp_avg_sq.NAME), so that any d, t and p can read what any other has written.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shakedown.core.errors import ConfigError
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import FAMILIES, tensor_parallel
from shakedown.training.engines.dcp_store import read_state
from shakedown.training.engines.head import OutputHead
from shakedown.training.engines.scoring import Head, kept_columns

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")

State = dict[str, dict[str, torch.Tensor]]

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")  # model.layers.11.mlp.up_proj.weight


def check_model(config: Any, *, t: int, p: int) -> None:
    """Refuse models and cuts that a stage would not compute as transformers does.

    Raises:
        ConfigError: another kind of model, or t or p do not divide it.
    """
    family = getattr(config, "model_type", None)
    # In these the parts are model.embed_tokens, model.layers, model.norm and lm_head, and layers
    # need nothing but hidden states and positions: they can be taken apart.
    if family not in FAMILIES:
        raise _unsupported(f"model type {family!r}", f"one of {', '.join(FAMILIES)}")
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise _unsupported("sliding-window attention", "full attention in every layer")
    layers = int(config.num_hidden_layers)
    if layers % p:
        divisors = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ConfigError(
            f"allocation: p{p} does not divide the model's {layers} layers",
            hint=f"p must be one of {divisors}",
        )
    tensor_parallel.check(config, t)


class Stage(nn.Module):  # type: ignore[misc]
    """Consecutive layers; the first stage has the embedding, the last one norm and head.

    Parameters have the names of the whole model, but layers count from 0; see `named`.

    Attributes:
        begin: called with the number of a micro batch before it is computed; returns it.
        finish: hidden states [N, C, H] before the kept columns, the head and that number -> output
            of the last stage.
    """

    begin: Callable[[int], TokenBatch]
    finish: Callable[[torch.Tensor, Head, int], torch.Tensor]

    def __init__(self, whole: Any, *, p: int, ps: int, tensor_ranks: Any = None) -> None:
        """Takes the model apart: of `whole` only this stage is left."""
        super().__init__()
        self.config, self._tensor_ranks = whole.config, tensor_ranks
        self.is_first, self.is_last = p == 0, p == ps - 1
        decoder = whole.model
        count = len(decoder.layers) // ps
        self._before = p * count
        decoder.layers = decoder.layers[p * count : (p + 1) * count]
        if not self.is_first:
            decoder.embed_tokens = None  # not called: hidden states are given in place of tokens
        if not self.is_last:
            decoder.norm = nn.Identity()  # called after the layers, whichever they are
        self.model = decoder
        self.lm_head = whole.lm_head if self.is_last else None

    def forward(self, inputs: torch.Tensor, *, index: torch.Tensor) -> torch.Tensor:
        """Token ids [N, T] or hidden states [N, T, H] in; hidden states or `finish`'s value out."""
        number = int(index)
        batch = self.begin(number)
        given = "input_ids" if self.is_first else "inputs_embeds"
        # No attention mask: padding stands after every token that counts, and attention is causal.
        hidden: torch.Tensor = self.model(**{given: inputs}, use_cache=False).last_hidden_state
        if self.lm_head is None:
            return hidden
        rows = batch.tokens.shape[0]  # fewer than N, where the schedule's shape is filled up
        kept = hidden[:rows, kept_columns(batch) - 1]
        return self.finish(kept, OutputHead(self.lm_head).gathered(self._tensor_ranks), number)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their name in the whole model; a tied head on its own as the embedding."""
        found = {}
        for name, parameter in self.named_parameters():
            whole = _LAYER.sub(lambda m: f"model.layers.{int(m[1]) + self._before}.", name)
            tied = whole == HEAD and self.config.tie_word_embeddings
            found[EMBEDDING if tied else whole] = parameter
        return found


class Unseen(nn.Module):  # type: ignore[misc]
    """A stage as torch's schedules get it: not as a module of FSDP.

    Of one that they see they keep the gradients of all micro batches whole on every rank, 4 bytes
    a parameter, and reduce them after the last.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.stage(*inputs, index=index)
        return output


def stage_of(name: str, *, layers: int, ps: int) -> int:
    """The stage that answers for a parameter of the whole model."""
    found = _LAYER.match(name)
    if found:
        return int(found[1]) // (layers // ps)
    return 0 if name == EMBEDDING else ps - 1


def stack_tokens(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """The inputs of all micro batches in one shape, below each other: int64 [count * N, T - 1].

    A pipeline's stages agree on one shape before they run. What is filled up is never scored.
    """
    rows = max(batch.tokens.shape[0] for batch in batches)
    width = max(batch.tokens.shape[1] for batch in batches) - 1
    stacked = batches[0].tokens.new_zeros(len(batches), rows, width)
    for one, batch in zip(stacked, batches, strict=True):
        inputs = batch.tokens[:, :-1]
        one[: inputs.shape[0], : inputs.shape[1]] = inputs
    return stacked.flatten(0, 1)


def state_of(stage: Stage, optimizer: torch.optim.Optimizer) -> State:
    """This rank's part; the tensors are the live ones. Moments are made where none are yet."""
    state: State = {WEIGHT: {}, **{kind: {} for kind in MOMENTS}}
    for name, parameter in stage.named().items():
        state[WEIGHT][name] = parameter.detach()
        moments = optimizer.state[parameter]
        # torch makes them at the first update; a checkpoint may be written or read before it.
        if not moments:
            moments |= {kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}
            moments["step"] = torch.zeros((), device=parameter.device)
        for kind in MOMENTS:
            state[kind][name] = moments[kind]
    return state


def state_to_write(stage: Stage, optimizer: torch.optim.Optimizer) -> State:
    """As `state_of`; of a tied weight the first stage's copy is written."""
    state = state_of(stage, optimizer)
    if not stage.is_first:
        for tensors in state.values():
            tensors.pop(EMBEDDING, None)
    return state


def load_state(
    stage: Stage, optimizer: torch.optim.Optimizer, folder: Path, *, updates: int
) -> None:
    """(collective) Read what was written, at any layout, into the live tensors.

    Raises:
        StorageError: missing, incomplete, or written by another engine or for another model.
    """
    state: dict[str, Any] = state_of(stage, optimizer)
    read_state(state, folder)
    # torch's AdamW keeps the count with every parameter; on disk it is one number in meta.json.
    for parameter in stage.parameters():
        optimizer.state[parameter]["step"].fill_(updates)


def _unsupported(found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the archon engine cannot train this model: {found}; expected {expected}",
        hint="train it with fsdp:dN",
    )
