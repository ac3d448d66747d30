"""How a causal language model of transformers makes logits of its last hidden states."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from transformers.modeling_outputs import BaseModelOutputWithPast

from shakedown.training.engines.scoring import Head

# Errors of a forward pass whose parts are not where `_Between` puts its own.
_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class OutputHead:
    """A model's last matrix, and what the model's own code does with its product (`Head.after`)."""

    linear: nn.Linear
    after: Callable[[torch.Tensor], torch.Tensor] | None = None

    def gathered(self, tensor_ranks: Any = None) -> Head:
        """The head with the weights that are gathered at this moment.

        Args:
            tensor_ranks: the group of those that hold the same whole head: each makes the logits
                of its part of the words.
        """
        weight, bias = self.linear.weight, self.linear.bias
        if tensor_ranks is None:
            return Head(_plain(weight), None if bias is None else _plain(bias), self.after)
        size = -(-len(weight) // dist.get_world_size(tensor_ranks))
        first = size * dist.get_rank(tensor_ranks)
        weight, bias = (None if v is None else _rows(v, first, size) for v in (weight, bias))
        return Head(weight, bias, self.after, first, tensor_ranks)


def find_head(model: Any) -> OutputHead | None:
    """The head of a model that is not spread yet; None where it is not of this form:

    one matrix over the base model's last hidden states, then at most what it does with each logit
    alone, such as a soft cap (Gemma 2) or a scale (Cohere, Granite). The model's own forward pass
    says so, with its base model and its matrix taken out: no table of families is needed.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        return None
    probe = torch.linspace(-40.0, 40.0, linear.out_features)[None]
    try:
        between = _Between(model, linear)
        whole = between(probe.clone())
        parts = [between(part.clone()) for part in probe.split(linear.out_features // 2 + 1, 1)]
    except _REFUSALS:
        return None
    if not between.direct or not torch.equal(torch.cat(parts, 1), whole):
        return None
    return OutputHead(linear, None if torch.equal(whole, probe) else between)


class _Between:
    """A model's forward pass from the product of its last matrix on.

    Attributes:
        direct: whether the matrix gets the base model's hidden states as they are.
    """

    def __init__(self, model: Any, linear: nn.Linear) -> None:
        # Shares all with the model but what is put into the two places. Called without the hooks.
        self._model = copy.copy(model)
        self._model._modules = dict(model._modules)
        (place,) = [name for name, module in model._modules.items() if module is linear]
        self._model._modules[model.base_model_prefix] = _Said(self._hidden)
        self._model._modules[place] = _Said(self._product)
        # Of a size that no slice of positions shortens.
        self._states = torch.linspace(-1.0, 1.0, linear.in_features)[None, None]
        self._logits = torch.empty(0)
        self.direct = True

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [R, C] of any words."""
        self._logits = logits[None]
        found: torch.Tensor = self._model.forward(
            input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False
        ).logits
        self._logits = torch.empty(0)
        return found[0]

    def _hidden(self, *_args: Any, **_kwargs: Any) -> "_Output":
        return _Output(last_hidden_state=self._states)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        self.direct = self.direct and torch.equal(hidden, self._states)
        return self._logits


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    """The output of any base model: parts that only some have (router logits) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Said(nn.Module):  # type: ignore[misc]
    """A module that is one function."""

    def __init__(self, say: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = say


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Whole on every tensor rank, as a tensor that carries its gradient back."""
    return value.to_local() if isinstance(value, DTensor) else value


def _rows(value: DTensor, first: int, size: int) -> torch.Tensor:
    """Some rows; the gradients of all tensor ranks' rows add up to that of the whole."""
    whole = value.to_local(grad_placements=[Partial()])
    return whole[first : first + size]
