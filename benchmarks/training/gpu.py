"""Tokens a second and MFU of one device: our FSDP engine against plain transformers and AdamW.

Both train the same random tokens in bfloat16 with float32 master weights where they have them,
turn by turn in one process. The same code runs a tiny shape on a CPU.
"""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Qwen3-0.6B's own configuration, as its model card and config.json give it.
QWEN3_06B: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY: Mapping[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
# Dense bfloat16 peak in TFLOP/s, from NVIDIA's data sheets, without sparsity.
PEAKS = {
    "H100 PCIE": 756.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}


@dataclass(frozen=True)
class Shape:
    """`rows` sequences of `length` tokens a step."""

    model: Mapping[str, Any]
    rows: int
    length: int


@dataclass(frozen=True)
class Speed:
    """Median over the repeats; `mfu` is None where the device's peak is not known."""

    tool: str
    tokens_per_s: float
    mfu: float | None
    first_loss: float
    peak_gib: float


def flops_per_token(model: Mapping[str, Any], parameters: int, length: int) -> float:
    """Floating-point operations of forward and backward pass for one token.

    6 N + 6 L h d T: PaLM's formula (appendix B: 6 N + 12 L h d T), its attention part halved, as
    half of a causal attention is not computed. N counts the embedding once: tied, it is the head.
    """
    width: int = model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"]
    return 6.0 * parameters + 6.0 * width * length


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 operations a second of a device by its name, or None."""
    found = [peak for name, peak in PEAKS.items() if name in device.upper()]
    return 1e12 * found[0] if found else None


def measure(shape: Shape, *, steps: int, repeats: int, warmup: int = 2) -> list[Speed]:
    """Both sides, ABAB, on the GPU where there is one; the batches are equal.

    Raises:
        ValueError: the two sides' first losses are not those of the same model and batch.
    """
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    size = (shape.rows, shape.length + 1)
    tokens = torch.randint(3, shape.model["vocab_size"], size)
    with tempfile.TemporaryDirectory() as name, _one_rank(device):
        parameters = _write(Path(name), shape)
        sides: dict[str, Callable[[Path, Any, Any], Callable[[], float]]]
        sides = {"ours": _ours, "transformers": _plain}
        if device.type == "cuda":  # on a CPU compiling takes longer than all the rest
            sides["ours, compile: true"] = partial(_ours, compiled=True)
        times: dict[str, list[float]] = {tool: [] for tool in sides}
        first, peaks = dict[str, float](), dict[str, float]()
        for _ in range(repeats):
            for tool, build in sides.items():
                seconds, loss, peak = _timed(
                    build(Path(name), tokens, device), device, steps=steps, warmup=warmup
                )
                times[tool].append(seconds)
                first[tool], peaks[tool] = loss, peak
    if max(first.values()) - min(first.values()) > 0.02:  # bfloat16 keeps two to three digits
        raise ValueError(f"the first losses differ: {first}")
    label = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    per_step = shape.rows * shape.length
    peak_rate = peak_flops(label)
    work = flops_per_token(shape.model, parameters, shape.length)
    speeds = {tool: per_step / statistics.median(values) for tool, values in times.items()}
    return [
        Speed(
            tool,
            round(speed, 1),
            None if peak_rate is None else round(speed * work / peak_rate, 4),
            first[tool],
            peaks[tool],
        )
        for tool, speed in speeds.items()
    ]


def table(speeds: Sequence[Speed]) -> str:
    """A Markdown table."""
    lines = ["| trainer | tokens/s | MFU | peak GiB | loss of step 1 |", "|" + " --- |" * 5]
    for speed in speeds:
        mfu = "-" if speed.mfu is None else f"{speed.mfu:.1%}"
        numbers = f"{speed.tokens_per_s:.0f} | {mfu} | {speed.peak_gib:.1f}"
        lines.append(f"| {speed.tool} | {numbers} | {speed.first_loss:.4f} |")
    return "\n".join(lines)


@contextmanager
def _one_rank(device: Any) -> Iterator[None]:
    """A process group of this process alone, which the engine needs."""
    import torch.distributed as dist

    from shakedown.cluster.nodes import free_port

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _write(folder: Path, shape: Shape) -> int:
    """The model with random weights in float32; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from shakedown.training.demo import write_model

    write_model(folder, seed=0)  # for its tokenizer: no token here is ever text
    config = Qwen3Config(
        max_position_embeddings=shape.length + 1, tie_word_embeddings=True, **shape.model
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def _ours(model: Path, tokens: Any, device: Any, *, compiled: bool = False) -> Callable[[], float]:
    """One step of the SFT loss by the engine that `fsdp:d1` names."""
    import torch

    from shakedown.config import OptimizerConfig
    from shakedown.training.algorithms.sft import negative_log_likelihood
    from shakedown.training.batch import TokenBatch
    from shakedown.training.engines import engine_class
    from shakedown.training.engines.base import EngineOptions, LossPart, Scores

    optimizer = OptimizerConfig(lr=1e-5)
    build = engine_class("fsdp:d1").build
    options = EngineOptions(compile=compiled)
    engine = build(model, optimizer=optimizer, dtype="bfloat16", device=device, options=options)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    lengths = torch.full((tokens.shape[0],), tokens.shape[1])
    batch = TokenBatch(tokens, lengths, mask)
    total = batch.trained_tokens

    def loss(scores: Scores, _batch: TokenBatch, _index: int) -> LossPart:
        return LossPart(negative_log_likelihood(scores.logprobs, total), {})

    def step() -> float:
        value = engine.forward_backward([batch], loss)["loss"]
        engine.step()
        return value

    return step


def _plain(model: Path, tokens: Any, device: Any) -> Callable[[], float]:
    """One step as a short script has it: autocast, the model's own loss, fused AdamW, clipping."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    moved = tokens.to(device)

    def step() -> float:
        network.train()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = network(input_ids=moved, labels=moved, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _timed(
    step: Callable[[], float], device: Any, *, steps: int, warmup: int
) -> tuple[float, float, float]:
    """Seconds a step, loss of the very first step, and peak GiB of the device (0 on a CPU)."""
    import torch

    on_gpu = device.type == "cuda"
    gc.collect()  # what the other side left behind
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first = [step() for _ in range(warmup)]
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return (time.perf_counter() - began) / steps, first[0], round(peak, 2)
