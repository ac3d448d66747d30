"""What a dead server's log is read as. The expected causes were written before the first run."""

import re
from pathlib import Path

import pytest

from shakedown.inference.explain import RULES, LogWatch, likely_cause

# (words of the expected cause, lines as the engine, a library, the kernel or Slurm writes them)
LOGS = [
    # vllm/model_executor/model_loader/default_loader.py
    ("no weights", "RuntimeError: Cannot find any model weights with `/models/policy`"),
    # transformers/modeling_utils.py
    (
        "no weights",
        "OSError: /models/policy does not appear to have a file named model.safetensors or "
        "pytorch_model.bin",
    ),
    # vllm/model_executor/models/registry.py
    (
        "architecture",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Model architectures ['FooForCausalLM'] are not supported for now. "
        "Supported architectures: dict_keys(['AfmoeForCausalLM', ",
    ),
    # transformers/models/auto/configuration_auto.py
    (
        "architecture",
        "ValueError: The checkpoint you are trying to load has model type `foo` but Transformers "
        "does not recognize this architecture. This could be because of an issue with the",
    ),
    # vllm/config/model.py
    (
        "sizes",
        "ValueError: Total number of attention heads (14) must be divisible by tensor parallel "
        "size (4).",
    ),
    # vllm-project/vllm issue 10556
    (
        "NUMA",
        "ERROR 11-21 23:44:54 engine.py:366] RuntimeError: numa_migrate_pages failed. errno: 1",
    ),
    # vllm-project/vllm pull request 31519
    ("NUMA", "libnuma: Warning: cpu argument 30 out of range\n\n<30> is invalid"),
    # huggingface_hub/utils/_http.py: 401 is also what a missing name gives
    (
        "hub refuses",
        "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: x)\n\n"
        "Repository Not Found for url: https://huggingface.co/api/models/org/private.\n"
        "Please make sure you specified the correct `repo_id` and `repo_type`.",
    ),
    (
        "hub refuses",
        "OSError: You are trying to access a gated repo.\n"
        "Make sure to have access to it at https://huggingface.co/meta-llama/Llama-3.1-8B.",
    ),
    (
        "hub refuses",
        "403 Client Error.\n\nCannot access gated repo for url https://huggingface.co/a.",
    ),
    # vllm-project/vllm issue 7940
    ("torchvision", "RuntimeError: operator torchvision::nms does not exist"),
    ("torchvision", "ModuleNotFoundError: No module named 'torchvision'"),
    # transformers/utils/import_utils.py
    (
        "torchvision",
        "ImportError: \nQwen3VLVideoProcessor requires the Torchvision library but it was not "
        "found in your environment.",
    ),
    # torch: the form of torch.OutOfMemoryError
    (
        "GPU's memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.12 GiB is free.",
    ),
    # vllm/v1/worker/utils.py
    (
        "GPU's memory",
        "ValueError: Free memory on device cuda:0 (3.21/79.1 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 71.19 GiB). Decrease GPU memory utilization or reduce GPU "
        "memory used by other processes.",
    ),
    # sgl-project/sglang issue 4330
    (
        "cache",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ),
    # vllm/v1/core/kv_cache_utils.py
    (
        "cache",
        "ValueError: To serve at least one request with the model's max seq len (40960), (4.38 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (0.25 GiB).",
    ),
    ("cache", "MemoryError: Memory footprint 987654321 is more than available memory 12345678"),
    ("cache", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_"),
    # snakemake/snakemake-executor-plugin-slurm pull request 371
    (
        "kernel",
        "slurmstepd: error: Detected 2 oom_kill events in StepId=7.13. Some of the step tasks have "
        "been OOM Killed.",
    ),
    # vllm-project/vllm issue 15800
    ("kernel", "ChildProcessError: worker died (-9)"),
    ("port", "OSError: [Errno 98] Address already in use"),
    (
        "port",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): "
        "address already in use",
    ),
    # vllm-project/vllm issues 20226 and 10626
    (
        "NCCL",
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    ),
    (
        "NCCL",
        "[rank1]:[E ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE",
    ),
    ("disk", "OSError: [Errno 28] No space left on device: '/home/u/.cache/vllm'"),
    ("not installed", "ModuleNotFoundError: No module named 'sglang'"),
    (
        "missing or incomplete",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
        "find them in the cached files.",
    ),
    # vllm/config/model.py
    (
        "longer than the model",
        "ValueError: User-specified max_model_len (40000) is greater than the derived "
        "max_model_len (max_position_embeddings=32768.0 or model_max_length=None in the "
        "model's config.json).",
    ),
    # safetensors 0.6, of a file of 200 of its 488 bytes and of a Git LFS pointer
    (
        "cut off or damaged",
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: "
        "incomplete metadata, file not fully covered",
    ),
    ("cut off or damaged", "Error while deserializing header: header too large"),
    # a vLLM server that was given the first 3000 bytes of model.safetensors
    (
        "cut off or damaged",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "  Value error, Unterminated string starting at: line 1 column 2989 (char 2988) "
        "[type=value_error, input_value=ArgsKwargs((), {'model_co...",
    ),
    # vllm/transformers_utils/utils.py, of a Git LFS pointer
    (
        "cut off or damaged",
        '  File "vllm/transformers_utils/utils.py", line 113, in parse_safetensors_file_metadata\n'
        '    metadata = json.loads(f.read(length_of_metadata).decode("utf-8"))\nMemoryError',
    ),
    # vllm/model_executor/model_loader/weight_utils.py
    (
        "do not fit",
        "AssertionError: Attempted to load weight (torch.Size([384, 128])) into parameter "
        "(torch.Size([256, 128]))",
    ),
    # vllm/model_executor/models/utils.py
    ("do not fit", "ValueError: There is no module or parameter named 'foo' in Qwen3ForCausalLM"),
    # transformers/dynamic_module_utils.py
    (
        "its own code",
        "The repository org/model contains custom code which must be executed to correctly load "
        "the model.",
    ),
    # vllm/transformers_utils/config.py
    (
        "its own code",
        "RuntimeError: Failed to load the model config. If the model is a custom model not yet "
        "available in the HuggingFace transformers library, consider setting "
        "`trust_remote_code=True` in LLM or using the `--trust-remote-code` flag in the CLI.",
    ),
    # transformers/tokenization_utils_base.py
    ("no tokenizer", "OSError: Can't load tokenizer for '/models/policy'. If you were trying to"),
    # vllm/config/model.py
    ("quantisation", "ValueError: Unknown quantization method: foo. Must be one of ['awq', "),
    ("out of memory", "OSError: [Errno 12] Cannot allocate memory"),
    ("argument", "api_server.py: error: unrecognized arguments: --foo"),
]


@pytest.mark.parametrize(("words", "log"), LOGS)
def test_line_that_engines_write_is_named(words: str, log: str) -> None:
    cause = likely_cause(
        f"INFO 11-23 loading\n{log}\nRuntimeError: Engine core initialization failed."
    )

    assert cause is not None
    assert words in cause.text
    assert cause.remedy


@pytest.mark.parametrize(
    "log",
    [
        "",
        "INFO:     Application startup complete.",
        "INFO Engine 000: Avg prompt throughput: 10.1 tokens/s, GPU KV cache usage: 0.0%",
        # vllm-project/vllm issue 24016: a warning that changes nothing
        "get_mempolicy: Operation not permitted",
        "NCCL INFO Bootstrap: Using eth0",
        "WARNING numactl not found, NUMA binding is off",
        "INFO vLLM is using nccl==2.27.5",
        # vLLM writes its settings out
        "INFO Initializing a V1 LLM engine with config: model='m', trust_remote_code=True, dtype=",
    ],
)
def test_line_of_a_healthy_server_names_nothing(log: str) -> None:
    assert likely_cause(log) is None


def test_death_by_sigkill_without_a_line_is_likely_the_kernels() -> None:
    cause = likely_cause("INFO: Application startup complete.", -9)

    assert cause is not None
    assert "killed from outside" in cause.text


def test_no_pattern_searches_without_bounds() -> None:
    assert not [rule.cause for rule in RULES if re.search(r"[.\])][*+]", rule.pattern)]


def test_every_rule_has_a_source_and_a_line_that_it_is_the_first_to_match() -> None:
    named = {cause.text for _, log in LOGS if (cause := likely_cause(log))}

    assert not [rule.cause for rule in RULES if rule.cause not in named]
    assert all(rule.source and rule.remedy for rule in RULES)


LINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def test_line_that_is_written_in_two_parts_is_seen_once(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    watch = LogWatch(log)
    assert not watch.look()

    log.write_text("INFO\n" + LINE[:10])
    assert not watch.look()
    log.write_text("INFO\n" + LINE)

    assert watch.look()
    assert "GPU's memory" in watch.trouble
    assert not watch.look()


def test_cause_that_scrolled_by_is_told_at_death(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LINE + "INFO: fine\n" * 300_000)

    cause = LogWatch(log).cause(1)

    assert cause is not None
    assert "GPU's memory" in cause.text


def test_end_of_the_log_wins_over_what_was_named_before(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        LINE + "INFO: fine\n" * 300_000 + "OSError: [Errno 28] No space left on device\n"
    )

    cause = LogWatch(log).cause(1)

    assert cause is not None
    assert "disk is full" in cause.text


def test_missing_log_leaves_the_exit_code(tmp_path: Path) -> None:
    watch = LogWatch(tmp_path / "none")

    cause = watch.cause(-9)

    assert cause is not None
    assert "killed from outside" in cause.text
    assert watch.cause(1) is None
