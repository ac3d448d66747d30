"""Training algorithms by name; imports without torch."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shakedown.training.algorithms.base import Algorithm

# name -> module:class; the names are those of the config's `algorithm` key.
ALGORITHMS: dict[str, str] = {
    "sft": "shakedown.training.algorithms.sft:Sft",
    "grpo": "shakedown.training.algorithms.grpo:Grpo",
}


def algorithm_class(name: str) -> "type[Algorithm]":
    """The class of an algorithm that the config has accepted."""
    module, _, attribute = ALGORITHMS[name].partition(":")
    found: type[Algorithm] = getattr(importlib.import_module(module), attribute)
    return found
