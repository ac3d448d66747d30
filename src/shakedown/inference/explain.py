"""The likely cause why a server did not start or died, read from its log."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LikelyCause:
    """A likely cause in words, and its remedy."""

    text: str
    remedy: str


@dataclass(frozen=True)
class CausePattern:
    """A log pattern of an engine, a library, the kernel or Slurm, and the cause that it shows.

    `source`: the code that writes it (below site-packages) or a public report of it.
    """

    pattern: str
    cause: str
    remedy: str
    source: str


_PIECE = 1 << 20  # bytes at one look: a log that grows faster is read on at the next
_END = 1 << 16  # characters before the end, in which a death is looked for first
# The last line of a Python traceback. Behind a quote it is only mentioned: vLLM's warning about
# few file descriptors quotes the OSError that may follow.
_ERROR = re.compile(r"(?<![\w`'\"])\w{1,80}(?:Error|Exception): [^\n]{1,300}")

# No pattern has an unbounded `.*`: a log of repeated words would be searched for minutes.
# The first rule whose pattern is found decides: from the most exact to the most general.
RULES: tuple[CausePattern, ...] = (
    CausePattern(
        r"(?i)address already in use|Errno 98\b",
        "the port is in use",
        "choose another --port, or leave it out and a free one is taken",
        "Linux's EADDRINUSE, as Python and uvicorn write it",
    ),
    CausePattern(
        r"operator torchvision::\w+ does not exist|No module named '?torchvision"
        r"|requires the Torchvision library",
        "torchvision is missing, or made for another torch",
        "install the one made for this torch; for text alone: pip uninstall torchvision",
        "vllm-project/vllm issue 7940; transformers/utils/import_utils.py",
    ),
    CausePattern(
        r"No module named '?(vllm|sglang|transformers)|ModuleNotFoundError",
        "the engine or a part of it is not installed",
        "pip install 'slurm-shakedown[cpu]', or '[cuda]' or '[sglang]' on a machine with GPUs",
        "Python's import",
    ),
    CausePattern(
        r"unrecognized arguments?|No such option|invalid choice|the following arguments are",
        "the engine does not know an argument",
        "fix serve.extra_args: the log says which argument",
        "argparse, and click of `transformers serve`",
    ),
    CausePattern(
        r"architectures \[.{0,300}\] (are not supported|failed to be inspected)"
        r"|does not recognize this architecture",
        "the engine does not know the model's architecture",
        "install an engine and transformers that know it, or serve another model",
        "vllm/model_executor/models/registry.py; transformers/models/auto/configuration_auto.py",
    ),
    CausePattern(
        r"attention heads \(\d+\) must be divisible by tensor parallel",
        "the model's sizes cannot be cut as serve.allocation says",
        "choose a t of serve.allocation that divides the number of attention heads",
        "vllm/config/model.py",
    ),
    CausePattern(
        r"401 Client Error|403 Client Error|gated repo|GatedRepo",
        "the hub refuses the model: it is private, gated, or there is none of that name",
        "check model.source, then export HF_TOKEN of an account that may read it",
        "huggingface_hub/utils/_http.py",
    ),
    CausePattern(
        r"Cannot find any model weights|does not appear to have a file named (model|pytorch_model)",
        "the model's folder holds no weights",
        "put *.safetensors beside config.json: the download or export is not complete",
        "vllm/model_executor/model_loader/default_loader.py; transformers/modeling_utils.py",
    ),
    CausePattern(
        # vLLM reads the header itself, too: a Git LFS pointer ends it with a MemoryError there.
        r"SafetensorError|Error while deserializing header|in parse_safetensors_file_metadata"
        r"|for VllmConfig\s{1,9}Value error, (Expecting|Unterminated string|Extra data)",
        "the model's weights are cut off or damaged",
        "compare the sizes of *.safetensors with where they come from; 130 bytes are a Git LFS "
        "pointer: git lfs pull",
        "safetensors' Python binding; vllm/transformers_utils/utils.py",
    ),
    CausePattern(
        r"Attempted to load weight|There is no module or parameter named"
        r"|size mismatch for \w|The size of tensor a .{0,60}must match the size of tensor b",
        "the weights do not fit config.json",
        "take config.json and *.safetensors from the same checkpoint",
        "vllm/model_executor/model_loader/weight_utils.py; vllm/model_executor/models/utils.py; "
        "torch's load_state_dict",
    ),
    CausePattern(
        r"contains custom code which must be executed|requires you to execute custom code"
        r"|consider setting `trust_remote_code",
        "the model has its own code, which the engine does not run unless told to",
        "read that code; then --trust-remote-code in serve.extra_args",
        "transformers/dynamic_module_utils.py; vllm/transformers_utils/config.py",
    ),
    CausePattern(
        r"Can't load tokenizer for|Couldn't instantiate the backend tokenizer",
        "the model's folder holds no tokenizer",
        "put tokenizer.json and tokenizer_config.json beside config.json",
        "transformers/tokenization_utils_base.py and tokenization_utils_tokenizers.py",
    ),
    CausePattern(
        r"Unknown quantization method|Quantization method specified in the model config",
        "the engine does not know the model's quantisation, or was given another one",
        "take --quantization out of serve.extra_args, or serve weights that are not quantised",
        "vllm/config/model.py",
    ),
    CausePattern(
        r"No available memory for the cache|less than requested memory for kv"
        r"|larger than the available KV cache memory|Please try to increase --mem-fraction-static"
        r"|Memory footprint \d+ is more than available memory",
        "out of memory: no room for the key-value cache",
        "lower serve.max_model_len, or give the cache more: serve.kv_cache_gb on a CPU, on GPUs "
        "--gpu-memory-utilization or --mem-fraction-static in serve.extra_args",
        "vllm/v1/core/kv_cache_utils.py; sgl-project/sglang issue 4330; "
        "transformers/generation/continuous_batching/cache.py",
    ),
    CausePattern(
        r"CUDA out of memory|CUDA error: out of memory|less than desired GPU memory utilization",
        "out of memory: the GPU's memory is full",
        "nvidia-smi: does another process hold it? else lower --gpu-memory-utilization or "
        "--mem-fraction-static in serve.extra_args, or cut the model over more GPUs",
        "torch's allocator; vllm/v1/worker/utils.py",
    ),
    CausePattern(
        r"(?i)oom[-_ ]kill|Out of memory: Killed process|worker died \(-9\)",
        "out of memory: the kernel killed a process",
        "lower serve.kv_cache_gb, or ask for more memory: sacct -j JOB -o State,MaxRSS,ReqMem",
        "Linux's mm/oom_kill.c; slurmstepd; vllm-project/vllm issue 15800",
    ),
    CausePattern(
        r"[Oo]ut of memory|OutOfMemory|Cannot allocate memory|MemoryError",
        "out of memory",
        "lower serve.kv_cache_gb or serve.max_model_len, or use a machine with more memory",
        "Python's MemoryError, Linux's ENOMEM, torch.OutOfMemoryError",
    ),
    CausePattern(
        r"NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError"
        r"|Watchdog caught collective operation timeout",
        "NCCL: the GPUs could not work together",
        "shakedown preflight; then start with NCCL_DEBUG=INFO: its lines before the error say why",
        "vllm-project/vllm issues 20226 and 10626; torch's ProcessGroupNCCL.cpp",
    ),
    CausePattern(
        r"Repository Not Found|RepositoryNotFound|not a valid model identifier"
        r"|does not appear to have a file named|is not a local folder"
        r"|couldn't connect to|Cannot find the requested files|LocalEntryNotFound"
        r"|No such file or directory: .{0,300}(config\.json|safetensors)|Invalid repository ID",
        "the model is missing or incomplete",
        "check model.source: a folder with config.json and *.safetensors, or a hub name",
        "huggingface_hub/utils/_http.py; transformers/utils/hub.py",
    ),
    CausePattern(
        r"max_model_len .{0,40}greater than the derived",
        "serve.max_model_len is longer than the model allows",
        "lower serve.max_model_len",
        "vllm/config/model.py",
    ),
    # Late: libnuma also warns where something else then ends the server.
    CausePattern(
        r"numa_migrate_pages failed|libnuma: (Warning|Error)|set_mempolicy: "
        r"|numactl: .{0,80}(failed|not permitted|invalid)",
        "NUMA: the engine may not bind its memory or threads here",
        "set VLLM_CPU_OMP_THREADS_BIND=nobind, or allow the container SYS_NICE",
        "vllm-project/vllm issue 10556, pull requests 31519 and 45438",
    ),
    CausePattern(
        r"No space left on device",
        "a disk is full",
        "free space (also in /dev/shm and in the cache folder of the home directory)",
        "Linux's ENOSPC",
    ),
)


def likely_cause(log: str, returncode: int | None = None) -> LikelyCause | None:
    """The cause that the log names, or that a death by SIGKILL suggests."""
    for rule in RULES:
        if re.search(rule.pattern, log):
            return LikelyCause(rule.cause, rule.remedy)
    # -9 as Python gives a death by SIGKILL, 137 (128 + 9) as a shell or a container gives it.
    if returncode in (-9, 137):
        return LikelyCause(
            "killed from outside, most often by the kernel for lack of memory",
            "dmesg | tail; or ask Slurm: sacct -j JOB -o State,MaxRSS",
        )
    return None


def first_error(log: str) -> str:
    """The first exception of a log in its own words: those after it are mostly its consequences."""
    found = _ERROR.search(log)
    return found[0] if found else ""


def log_end(text: str, lines: int = 15) -> str:
    """The last lines that say something, each cut to a readable length."""
    kept = [line.rstrip()[:240] for line in text.splitlines() if line.strip()]
    return "\n".join(kept[-lines:])


class LogWatch:
    """The trouble that a log named last, over the server's whole life."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._end = path, 0, ""
        self._last: LikelyCause | None = None

    @property
    def trouble(self) -> str:
        """The cause that the log named last; empty when it never named one."""
        return self._last.text if self._last else ""

    def look(self) -> bool:
        """Read on; whether the log names a different trouble from before."""
        before = self.trouble
        self._read_on()
        return self.trouble != before

    def cause(self, returncode: int | None) -> LikelyCause | None:
        """Why the server ended: by the log's end, by what it named before, by its exit code."""
        while self._read_on():
            pass
        return likely_cause(self._end) or self._last or likely_cause("", returncode)

    def _read_on(self) -> bool:
        """Read the new part; whether there was any."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._read)
                found = stream.read(_PIECE)
        except OSError:  # not there yet, or a disk's outage: read at a later look
            return False
        self._read += len(found)
        piece = found.decode("utf-8", "replace")
        # With the unfinished line before it, which a piece may have cut in two.
        line = self._end.rpartition("\n")[2]
        self._last = likely_cause(line + piece) or self._last
        self._end = (self._end + piece)[-_END:]
        return bool(found)
