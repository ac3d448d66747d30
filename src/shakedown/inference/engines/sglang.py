"""SGLang: `python -m sglang.launch_server` and its native /generate.

Written from its documentation and tested against a server that speaks the documented protocol;
the engine itself needs CUDA.
"""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from shakedown.inference.engines.base import (
    Capabilities,
    Completion,
    GenerationRequest,
    LaunchSpec,
    Machine,
    Request,
    ServerLaunch,
    TokenEngine,
    engine_environment,
    guarded_module,
    malformed,
    this_machine,
)
from shakedown.inference.upstream import NEUTRAL

_UPDATE = "/update_weights_from_disk"


class SglangEngine(TokenEngine):
    """Replies carry tokens as [logprob, token id, text or null]."""

    name = "sglang"
    health_path = "/health"
    capabilities = Capabilities(
        token_ids=True, logprobs=True, prompt_logprobs=True, weight_update=True, messages=False
    )
    # SGLang's srt/metrics/collector.py.
    metrics = MappingProxyType(
        {
            "running": "sglang:num_running_reqs",
            "waiting": "sglang:num_queue_reqs",
            "cache": "sglang:token_usage",
            "finished": "sglang:num_requests_total",
            "prompt_tokens": "sglang:prompt_tokens_total",
            "generated_tokens": "sglang:generation_tokens_total",
        }
    )
    replica_label = "dp_rank"
    note = "this adapter follows SGLang's documentation; it was not run against the engine"

    def launch(self, spec: LaunchSpec, machine: Machine | None = None) -> ServerLaunch:
        machine = machine or this_machine()
        argv = guarded_module(spec, "sglang.launch_server")
        argv += ["--model-path", spec.model, "--served-model-name", spec.served_name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--random-seed", str(spec.seed)]
        argv += ["--dtype", spec.dtype, "--context-length", str(spec.max_model_len)]
        argv += ["--tp-size", str(spec.size(self.name, "t"))]
        argv += ["--pp-size", str(spec.size(self.name, "p"))]
        argv += ["--dp-size", str(spec.size(self.name, "d"))]
        # Otherwise the model's own generation_config.json changes what is sampled.
        argv += ["--sampling-defaults", "openai"]
        # It sends its warm-up to itself by HTTP, without the secret. The readiness probe is one.
        argv += ["--skip-server-warmup"]
        # /metrics, by which the daemon sees whether the server is used.
        argv += ["--enable-metrics"]
        if not machine.cuda:
            argv += ["--device", "cpu"]
        env = engine_environment(spec)
        if spec.logprobs == "raw":
            env["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
        return ServerLaunch((*argv, *spec.extra_args), env)

    def probe(self, model: str) -> Request:  # noqa: ARG002 - one server, one model
        return Request("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 1}})

    def generate(self, model: str, wanted: GenerationRequest) -> Request:  # noqa: ARG002
        sampling = {
            "max_new_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
            **NEUTRAL,
            "n": wanted.samples,
        }
        body = {
            "input_ids": list(wanted.prompt),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        return Request("/generate", body)

    def parse_generation(self, reply: Any) -> list[Completion]:
        rows = reply if isinstance(reply, list) and reply else [reply]
        try:
            return [self._completion(row) for row in rows]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise malformed(self.name, "output_token_logprobs", reply) from error

    def _completion(self, row: Any) -> Completion:
        meta = row["meta_info"]
        finish = meta.get("finish_reason")
        kind = str(finish["type"] if isinstance(finish, dict) else finish)
        # Aborted before its first token, a sample may have no log-probabilities at all.
        places = meta.get("output_token_logprobs", [] if kind == "abort" else None)
        cached = meta.get("cached_tokens")
        return Completion(
            tokens=[int(place[1]) for place in places],
            logprobs=[float(place[0]) for place in places],
            text=row["text"],
            finish=kind,
            cached_tokens=None if cached is None else int(cached),
        )

    def score(self, model: str, tokens: Sequence[int]) -> Request:  # noqa: ARG002
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            # From the first token on; by default only the generated ones have logprobs.
            "logprob_start_len": 0,
        }
        return Request("/generate", body)

    def parse_score(self, reply: Any, tokens: Sequence[int]) -> list[float]:
        try:
            places = reply["meta_info"]["input_token_logprobs"]
            if [int(place[1]) for place in places] != list(tokens):
                raise malformed(self.name, "logprobs of the tokens that were sent", reply)
            # The first token has none: nothing stands before it.
            return [float(place[0]) for place in places[1:]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise malformed(self.name, "input_token_logprobs", reply) from error

    def to_replica(self, request: Request, replica: int) -> Request:
        # The former name of `routed_dp_rank`, which releases of both names take.
        body = {**request.body, "data_parallel_rank": replica}
        return dataclasses.replace(request, body=body)

    def update_weights(self, folder: str) -> list[Request]:
        return [Request(_UPDATE, {"model_path": folder, "flush_cache": True})]

    def interrupt(self) -> list[Request]:
        return [Request("/abort_request", {"rid": "", "abort_all": True})]

    def update_fault(self, request: Request, reply: Any) -> str:  # noqa: ARG002
        if isinstance(reply, dict) and reply.get("success") is True:
            return ""
        message = reply.get("message", "") if isinstance(reply, dict) else reply
        return f"the engine refused the weights: {str(message)[:300]}"
