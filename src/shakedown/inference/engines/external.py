"""Somebody else's server that speaks OpenAI's protocol only: never started here.

One that gives token ids and log-probabilities too is used by vLLM's or SGLang's own adapter
(inference/external.py).
"""

from typing import NoReturn

from shakedown.core.errors import UsageError
from shakedown.inference.engines.base import (
    Capabilities,
    InferenceEngine,
    LaunchSpec,
    Machine,
    Request,
)


class ExternalEngine(InferenceEngine):
    """Chat and text completions of a server at a URL."""

    name = "external"
    health_path = "/v1/models"  # OpenAI's protocol has no health check
    capabilities = Capabilities(
        token_ids=False, logprobs=False, prompt_logprobs=False, weight_update=False, messages=False
    )
    note = "it gives no token ids and log-probabilities by vLLM's or SGLang's protocol"

    def launch(self, spec: LaunchSpec, machine: Machine | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse: it is somebody else's.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "an external server is never started here",
            hint="set serve.url to where it answers, or serve.engine to vllm, sglang or "
            "transformers for a server of this run",
        )

    def probe(self, model: str) -> Request:
        return Request("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})
