"""`transformers serve`: light, starts in seconds, good for checking agents; no log-probabilities.

It accepts `logprobs` and drops it without a word, so this is no TokenEngine: what needs token ids
or logprobs is refused before it asks.
"""

from types import MappingProxyType

from shakedown.inference.engines.base import (
    Capabilities,
    InferenceEngine,
    Launch,
    LaunchSpec,
    Machine,
    Request,
    engine_environment,
    guarded_module,
    this_machine,
)


class TransformersEngine(InferenceEngine):
    """Serves one model under its own name; chat and text completions only."""

    name = "transformers"
    health_path = "/health"
    # It has none: inference/guarded.py counts.
    metrics = MappingProxyType(
        {"running": "shakedown:requests_running", "finished": "shakedown:requests_total"}
    )
    capabilities = Capabilities(
        token_ids=False, logprobs=False, prompt_logprobs=False, weight_update=False, messages=False
    )
    note = "this engine gives no log-probabilities: use it for agents, not for comparing tokens"

    def launch(self, spec: LaunchSpec, machine: Machine | None = None) -> Launch:
        machine = machine or this_machine()
        argv = guarded_module(spec, "transformers.cli.transformers")
        argv += ["serve", spec.model, "--host", spec.host, "--port", str(spec.port)]
        argv += ["--dtype", spec.dtype, "--device", "cuda" if machine.cuda else "cpu"]
        argv += ["--continuous-batching", "--default-seed", str(spec.seed)]
        return Launch((*argv, *spec.extra_args), engine_environment(spec))

    def served_name(self, spec: LaunchSpec) -> str:
        return spec.model  # any other name is refused

    def probe(self, model: str) -> Request:
        return Request("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})
