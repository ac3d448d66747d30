"""`transformers serve`: light, starts in seconds, good for checking agents; no log-probabilities.

It accepts `logprobs` and silently drops it, so this is not a TokenEngine: callers that need token
ids or logprobs are refused beforehand.
"""

from types import MappingProxyType

from shakedown.inference.engines.base import (
    Capabilities,
    InferenceEngine,
    LaunchSpec,
    Machine,
    Request,
    ServerLaunch,
    engine_environment,
    guarded_module,
    this_machine,
)

# The cache and the buffers beside it: those of a batch, and 0.6 GiB of logits for 150,000 tokens.
_LEAST_GIB = 1.0
_BATCH_TOKENS = 512  # its default of 8192 alone costs an attention mask of 0.25 GiB
_MOST = 0.8  # its own default


class TransformersEngine(InferenceEngine):
    """Serves one model under its own name; chat and text completions only."""

    name = "transformers"
    health_path = "/health"
    # It has none: inference/auth.py counts.
    metrics = MappingProxyType(
        {"running": "shakedown:requests_running", "finished": "shakedown:requests_total"}
    )
    capabilities = Capabilities(
        token_ids=False, logprobs=False, prompt_logprobs=False, weight_update=False, messages=False
    )
    note = "this engine gives no log-probabilities: use it for agents, not for comparing tokens"

    def launch(self, spec: LaunchSpec, machine: Machine | None = None) -> ServerLaunch:
        machine = machine or this_machine()
        argv = guarded_module(spec, "transformers.cli.transformers")
        argv += ["serve", spec.model, "--host", spec.host, "--port", str(spec.port)]
        argv += ["--dtype", spec.dtype, "--device", "cuda" if machine.cuda else "cpu"]
        argv += ["--continuous-batching", "--default-seed", str(spec.seed)]
        if not machine.cuda and machine.memory:
            # Its cache takes 80 % of the machine's memory by default, and touches all of it.
            share = min(_MOST, max(_LEAST_GIB, spec.kv_cache_gb) / machine.memory)
            argv += ["--cb-max-memory-percent", f"{share:.4f}"]
            argv += ["--cb-max-batch-tokens", str(_BATCH_TOKENS)]
        return ServerLaunch((*argv, *spec.extra_args), engine_environment(spec))

    def served_name(self, spec: LaunchSpec) -> str:
        return spec.model  # any other name is refused

    def probe(self, model: str) -> Request:
        return Request("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})
