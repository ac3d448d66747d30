"""Inference engines by name: one file per engine, one row here."""

from shakedown.core.errors import UsageError, look_up
from shakedown.inference.engines.base import (
    Capabilities,
    Completion,
    GenerationRequest,
    InferenceEngine,
    LaunchSpec,
    Machine,
    Request,
    ServerLaunch,
    TokenEngine,
    this_machine,
)
from shakedown.inference.engines.external import ExternalEngine
from shakedown.inference.engines.sglang import SglangEngine
from shakedown.inference.engines.transformers import TransformersEngine
from shakedown.inference.engines.vllm import VllmEngine

ENGINES: dict[str, InferenceEngine] = {
    "vllm": VllmEngine(),
    "sglang": SglangEngine(),
    "transformers": TransformersEngine(),
    "external": ExternalEngine(),
}


def get_engine(name: str) -> InferenceEngine:
    """Look an engine up.

    Raises:
        UsageError: no such engine.
    """
    return look_up("engine", name, ENGINES)


def get_token_engine(name: str) -> TokenEngine:
    """Look up an engine that takes token ids and tells logprobs.

    Raises:
        UsageError: no such engine, or it does neither.
    """
    engine = get_engine(name)
    if not isinstance(engine, TokenEngine):
        able = [each for each, found in ENGINES.items() if isinstance(found, TokenEngine)]
        raise UsageError(
            f"engine {name} takes no token ids and returns no logprobs",
            hint=f"set serve.engine to one of: {', '.join(able)}",
        )
    return engine


__all__ = [
    "ENGINES",
    "Capabilities",
    "Completion",
    "GenerationRequest",
    "InferenceEngine",
    "LaunchSpec",
    "Machine",
    "Request",
    "ServerLaunch",
    "TokenEngine",
    "get_engine",
    "get_token_engine",
    "this_machine",
]
