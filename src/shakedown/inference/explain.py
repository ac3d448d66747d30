"""Why a server did not start, read from the end of its log. Pure."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A likely cause, in words, and what to do."""

    text: str
    remedy: str


# The first pattern that is found decides: from the most exact to the most general.
_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (
        r"Address already in use|Errno 98|only one usage of each socket address",
        "the port is in use",
        "choose another --port, or leave it out and a free one is taken",
    ),
    (
        r"No module named '?(vllm|sglang|transformers)|ModuleNotFoundError",
        "the engine or a part of it is not installed",
        "pip install 'slurm-shakedown[cpu]', or '[cuda]' or '[sglang]' on a machine with GPUs",
    ),
    (
        r"unrecognized arguments?|No such option|invalid choice|the following arguments are",
        "the engine does not know an argument",
        "fix serve.extra_args: the log says which argument",
    ),
    (
        r"[Oo]ut of memory|OutOfMemory|Cannot allocate memory|MemoryError"
        r"|No available memory for the cache|less than requested memory for kv"
        r"|larger than the available KV cache memory",
        "out of memory",
        "lower serve.kv_cache_gb or serve.max_model_len, or use a machine with more memory",
    ),
    (
        r"Repository Not Found|RepositoryNotFound|not a valid model identifier"
        r"|does not appear to have a file named|is not a local folder"
        r"|couldn't connect to|Cannot find the requested files|LocalEntryNotFound"
        r"|No such file or directory: .*(config\.json|safetensors)|Invalid repository ID",
        "the model is missing or incomplete",
        "check model.source: a folder with config.json and *.safetensors, or a hub name",
    ),
    (
        r"User-specified max_model_len .* is greater|max_model_len .*greater than the derived",
        "serve.max_model_len is longer than the model allows",
        "lower serve.max_model_len",
    ),
    (
        r"No space left on device",
        "a file system is full",
        "free space (also in /dev/shm and in the cache folder of the home directory)",
    ),
)


def likely_cause(log: str, returncode: int | None = None) -> Cause | None:
    """The cause that the log names, or that a death by SIGKILL suggests."""
    for pattern, text, remedy in _PATTERNS:
        if re.search(pattern, log):
            return Cause(text, remedy)
    # -9 as Python gives a death by SIGKILL, 137 (128 + 9) as a shell or a container gives it.
    if returncode in (-9, 137):
        return Cause(
            "killed from outside, most often by the kernel for lack of memory",
            "dmesg | tail; or ask Slurm: sacct -j JOB -o State,MaxRSS",
        )
    return None


def log_end(text: str, lines: int = 15) -> str:
    """The last lines that say something, each cut to a readable length."""
    kept = [line.rstrip()[:240] for line in text.splitlines() if line.strip()]
    return "\n".join(kept[-lines:])
