"""Stands in for AReaL's own `areal.api.cli_args`: names and defaults are AReaL's."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class GenerationHyperparameters:
    """What an engine samples with."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    max_tokens: int = 32768
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0

    def new(self, **changes: Any) -> "GenerationHyperparameters":
        return GenerationHyperparameters(**{**asdict(self), **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> "GenerationHyperparameters":
        more = [tokenizer.pad_token_id, tokenizer.eos_token_id]
        return self.new(stop_token_ids=[*dict.fromkeys([*self.stop_token_ids, *more])])
