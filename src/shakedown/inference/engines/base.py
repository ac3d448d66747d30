"""Engine adapters: pure functions from a wanted server or reply to argv, env and HTTP requests."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from shakedown.cluster.allocation import parse_allocation
from shakedown.core.errors import ServerError, UsageError

# A machine this small is shared with trainer ranks: pinned threads would stand in their way.
FEW_CORES = 4
_EVERY_ADDRESS = ("0.0.0.0", "::", "*")  # noqa: S104 - refused
_KEY = "would show its key in `ps`, and every server asks for a secret on every route anyway"
_NOT_EXTRA = {
    "--api-key": _KEY,
    "--admin-api-key": _KEY,
    "--host": "is the server's address, which is given to clients",
}
_EXTRA_HINT = "leave it out: `serve start` has --host, and takes a key of yours from VLLM_API_KEY"


@dataclass(frozen=True)
class Machine:
    """The machine of a launch command: usable cores, CUDA device, memory in GiB (0: unknown)."""

    cores: int
    cuda: bool
    memory: float = 0.0


def this_machine() -> Machine:
    """The machine this process runs on, seen without importing torch."""
    # Both values hide every device from CUDA. The NVIDIA driver makes /dev/nvidiactl on any machine
    # with its GPUs.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    cuda = Path("/dev/nvidiactl").exists() and not hidden
    # The affinity, not os.cpu_count(): Slurm or a container may give a part of the machine's cores.
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return Machine(cores=len(os.sched_getaffinity(0)), cuda=cuda, memory=memory)


@dataclass(frozen=True)
class LaunchSpec:
    """A server to start.

    `model` is a local Hugging Face folder or a hub name; `kv_cache_gb` (GiB) counts on machines
    without CUDA; `allocation` is `vllm:d1t2`, cut by the grammar of cluster/allocation.py.
    `logprobs`: `processed` are those of the sampling distribution (what a policy update needs),
    `raw` those of the model before temperature; at temperature 1 both are equal. `prefix` is put
    before the command: a container or a profiler. `secret`: the file with the key that every
    request must carry.
    """

    model: str
    served_name: str = "policy"
    host: str = "127.0.0.1"
    port: int = 0
    dtype: str = "float32"
    max_model_len: int = 256
    kv_cache_gb: float = 1.0
    allocation: str = ""
    extra_args: tuple[str, ...] = ()
    seed: int = 0
    logprobs: Literal["processed", "raw"] = "processed"
    prefix: tuple[str, ...] = ()
    secret: str = ""

    def size(self, engine: str, letter: str) -> int:
        """Size of one parallel dimension: `d`, `t` or `p`.

        Raises:
            UsageError: the allocation gives nothing to `engine`.
        """
        if not self.allocation:
            return 1
        parts = parse_allocation(self.allocation).parts
        for part in parts:
            if part.backend == engine:
                return part.size(letter)
        given = ", ".join(part.backend for part in parts)
        raise UsageError(
            f"allocation {self.allocation!r} is for {given}, but the engine is {engine}",
            hint=f"use {engine}:d1, or set serve.engine",
        )

    @property
    def local_model(self) -> bool:
        """Whether `model` is a folder here rather than a hub name."""
        return Path(self.model).is_dir()


@dataclass(frozen=True)
class ServerLaunch:
    """A command and the variables to lay over the caller's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a running server. `messages`: it has Anthropic's /v1/messages too."""

    token_ids: bool
    logprobs: bool
    prompt_logprobs: bool
    weight_update: bool
    messages: bool


@dataclass(frozen=True)
class Request:
    """One HTTP request; `body` is sent as JSON."""

    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    method: Literal["GET", "POST"] = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationRequest:
    """`samples` continuations of one prompt of token ids, without top-p or top-k."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    samples: int = 1


@dataclass(frozen=True)
class Completion:
    """One continuation.

    `logprobs` are natural logarithms, one per token; the end-of-sequence token counts as sampled.
    `finish` is `stop` or `length`, or `abort` when it was interrupted; `cached_tokens` says how
    many prompt tokens came from the prefix cache (None: the engine does not tell).
    """

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    cached_tokens: int | None = None


class InferenceEngine(ABC):
    """An adapter: no I/O. Replies that are not of the documented form raise ServerError.

    `metrics`: field of inference/metrics.py's Metrics -> the engine's own name in `/metrics`;
    `replica_label`: the label there that tells data-parallel replicas apart.
    """

    name: str
    health_path: str
    capabilities: Capabilities
    note: str = ""
    metrics: Mapping[str, str] = MappingProxyType({})
    replica_label: str = ""

    @abstractmethod
    def launch(self, spec: LaunchSpec, machine: Machine | None = None) -> ServerLaunch:
        """The command and environment that start `spec` (on this machine when none is given)."""

    def served_name(self, spec: LaunchSpec) -> str:
        """The model name that clients must send."""
        return spec.served_name

    @abstractmethod
    def probe(self, model: str) -> Request:
        """The smallest real generation: one token after a text prompt."""


class TokenEngine(InferenceEngine):
    """An engine that takes token ids, tells logprobs and loads other weights while it runs."""

    @abstractmethod
    def generate(self, model: str, wanted: GenerationRequest) -> Request:
        """Ask for continuations with token ids and logprobs."""

    @abstractmethod
    def parse_generation(self, reply: Any) -> list[Completion]:
        """The continuations of a reply to `generate`."""

    @abstractmethod
    def score(self, model: str, tokens: Sequence[int]) -> Request:
        """Ask for the logprob of every token of a sequence."""

    @abstractmethod
    def parse_score(self, reply: Any, tokens: Sequence[int]) -> list[float]:
        """Logprobs of `tokens[1:]` from a reply to `score`."""

    @abstractmethod
    def to_replica(self, request: Request, replica: int) -> Request:
        """The request, to be answered by this data-parallel replica, counted from 0."""

    @abstractmethod
    def update_weights(self, folder: str) -> list[Request]:
        """Requests, in order, that load a Hugging Face folder and forget cached prefixes."""

    @abstractmethod
    def interrupt(self) -> list[Request]:
        """Requests, in order, that end what is being generated; new requests are served again.

        The requests that are ended answer with the tokens so far and `finish` `abort`.
        """

    @abstractmethod
    def update_fault(self, request: Request, reply: Any) -> str:
        """The fault in the reply to one request of `update_weights`; empty when there is none."""


def guarded_module(spec: LaunchSpec, module: str) -> list[str]:
    """The start of a command that runs an engine's module behind the server's secret.

    Raises:
        UsageError: it would listen on every address, or be given a key, which `ps` shows.
    """
    if spec.host in _EVERY_ADDRESS:
        raise UsageError(
            f"--host {spec.host}: a server listens on one address, not on all of the machine's",
            hint="give the address that clients reach, or leave --host out",
        )
    for argument in spec.extra_args:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _NOT_EXTRA:
            raise UsageError(f"serve.extra_args: {name} {_NOT_EXTRA[name]}", hint=_EXTRA_HINT)
    # -P: with -m alone Python looks in the working directory first, where a file or folder of the
    # user may bear the name of one of the engine's modules.
    run = [sys.executable, "-P", "-m", "shakedown.inference.auth"]
    return [*spec.prefix, *run, spec.secret, module]


def malformed(engine: str, what: str, reply: Any) -> ServerError:
    """The error for a reply that is not of the documented form."""
    return ServerError(f"the {engine} server answered without {what}: {str(reply)[:300]}")


def engine_environment(spec: LaunchSpec) -> dict[str, str]:
    """Environment variables of every engine.

    A local model needs no hub; asking it would only fail on nodes without a network. A server's
    processes are on one node: their collectives, which ask nobody for a secret, listen there.
    """
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {**local, "HF_HUB_OFFLINE": "1"} if spec.local_model else local
