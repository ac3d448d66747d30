"""Stands in for AReaL's own `areal.api`, which imports its whole training stack."""

from dataclasses import dataclass, field
from typing import Any

from areal.api.cli_args import GenerationHyperparameters
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow

InferenceEngine = Any


@dataclass
class ModelRequest:
    """The fields of AReaL's that its workflows of text set."""

    rid: str = ""
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    tokenizer: Any = None
    image_data: list[str] | None = field(default_factory=list)


@dataclass
class ModelResponse:
    """The fields of AReaL's that its workflows of text read."""

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    tokenizer: Any = None
    latency: float = float("inf")

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


__all__ = [
    "AsyncRewardWrapper",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "RolloutWorkflow",
]
