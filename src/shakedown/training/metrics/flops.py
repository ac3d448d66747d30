"""Model FLOPs, and the figures of GPUs: peak, memory and bandwidth. Pure.

Model FLOPs utilisation (MFU) as in PaLM (Chowdhery et al. 2022, appendix B): a token of a dense
decoder takes 6 N + 12 L H Q T operations, forward and backward, for N parameters in matrix
products, L layers, H heads of size Q and sequences of T tokens. The second term is the attention
over the whole sequence, not halved for the causal mask; Megatron-LM's formula (Narayanan et al.
2021, eq. 3 without its recomputation: 72 B s l h^2 (1 + s / 6h + V / 12lh)) is the same for a
model whose MLP is 4 h wide and whose heads fill h. Repeated computations (activation
checkpointing, scoring) do not count.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Decoders with q, k, v, o and a gated MLP of three matrices in every layer.
_GATED = frozenset({"gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"})

# Longest match wins. name -> {dtype: dense FLOP/s without sparsity}. float32 is that of the
# ordinary cores: torch leaves TF32 off. Sources, NVIDIA's and AMD's data sheets: A100 (2021), A10,
# A40, L4, L40S, H100 (2023: SXM, PCIe), H100 NVL, H200 (2024: SXM, NVL), HGX B200 and GB200 NVL72
# (2024, per GPU), Instinct MI300X (2023). Where a sheet gives the figure with
# sparsity alone, half of it is used.
_PEAKS: Mapping[str, Mapping[str, float]] = {
    "A10": {"bfloat16": 125e12, "float32": 31.2e12},
    "A40": {"bfloat16": 149.7e12, "float32": 37.4e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L4": {"bfloat16": 121e12, "float32": 30.3e12},
    "L40S": {"bfloat16": 362.05e12, "float32": 91.6e12},
    "H100": {"bfloat16": 989.4e12, "float32": 66.9e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51.2e12},
    "H100 NVL": {"bfloat16": 835.5e12, "float32": 60e12},
    "H200": {"bfloat16": 989.4e12, "float32": 66.9e12},
    "H200 NVL": {"bfloat16": 835.5e12, "float32": 60e12},
    "B200": {"bfloat16": 2250e12, "float32": 75e12},
    "GB200": {"bfloat16": 2500e12, "float32": 80e12},
    "MI300X": {"bfloat16": 1307.4e12, "float32": 163.4e12},
}
GB = 10**9
# (GB of memory, GB/s of its bandwidth), from the same sheets. Of A100s with 40 and 80 GB the
# smaller is used, unless the name says 80GB. Looked up on
# 2026-11-26: A100 in nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf as quoted on
# glennklockwood.com/garden/processors (40 GB and 1,555 GB/s, 312 TFLOP/s dense in bfloat16), H100
# (80 GB, 3.35 TB/s, 989.4) and HGX B200 (8 TB/s, 2,250) and GB200 (2,500) there too; B200 with 180
# GB as NVIDIA's DGX B200 page has it (1,440 GB and 64 TB/s for eight); H200's 141 GB and GB200's
# 186 GB in MLCommons' descriptions of submitted systems. The others were not looked up again.
_CARDS: Mapping[str, tuple[int, int]] = {
    "A10": (24, 600),
    "A40": (48, 696),
    "A100": (40, 1555),
    "L4": (24, 300),
    "L40S": (48, 864),
    "H100": (80, 3350),
    "H100 PCIe": (80, 2000),
    "H100 NVL": (94, 3900),
    "H200": (141, 4800),
    "H200 NVL": (141, 4800),
    "B200": (180, 8000),
    "GB200": (186, 8000),
    "MI300X": (192, 5300),
}
# As Slurm's gres could have them.
KNOWN_GPUS = tuple(name.lower().replace(" ", "_") for name in _CARDS)


@dataclass(frozen=True)
class Card:
    """`memory`: bytes. Drivers show some 6 % more than the sheet's GB (81,559 MiB of an H100's 80
    GB), which is left for what is not planned: CUDA's contexts, NCCL's buffers, the allocator.
    `bandwidth`: bytes per second.
    """

    name: str
    memory: int
    bandwidth: int


@dataclass(frozen=True)
class DecoderShape:
    """A dense decoder: `parameters` in matrix products, the output head among them."""

    parameters: int
    layers: int
    heads: int
    head_size: int

    def flops_per_token(self, length: float) -> float:
        """Operations of one token, forward and backward, in sequences of `length` tokens."""
        attention = 12 * self.layers * self.heads * self.head_size * length
        return 6 * self.parameters + attention


def shape_of(config: Any) -> DecoderShape | None:
    """The shape of a Hugging Face config; None for a model type that is not known here.

    The embedding is a look-up, not a product; the head counts also where it shares its weights.
    """
    if getattr(config, "model_type", "") not in _GATED:
        return None
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or hidden // heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    attention = hidden * size * (2 * heads + 2 * groups)
    mlp = 3 * hidden * int(config.intermediate_size)
    layers = int(config.num_hidden_layers)
    head = hidden * int(config.vocab_size)
    return DecoderShape(layers * (attention + mlp) + head, layers, heads, size)


def known_gpu(gpu: str) -> str | None:
    """The table's name of a GPU, by the one that torch or Slurm gives; None: it is not known.

    A slice of a GPU (`... MIG 1g.10gb`) is not known: its share is in no data sheet.
    """
    words = re.sub("[-_]", " ", gpu.upper()).split()
    known = [name for name in _PEAKS if _within(name.upper().split(), words)]
    return max(known, key=len) if known and "MIG" not in words else None


def peak_flops(gpu: str, dtype: str) -> float | None:
    """Dense FLOP/s of a GPU by any name of `known_gpu`; None for one that is not known."""
    name = known_gpu(gpu)
    return _PEAKS[name].get(dtype) if name else None


def card_of(gpu: str) -> Card | None:
    """The card by its name in Slurm's gres or the driver, such as h100; None if not known."""
    name = known_gpu(gpu)
    if name is None:
        return None
    memory, bandwidth = _CARDS[name]
    said = re.search(r"(\d+)GB", gpu.upper())
    return Card(name, (int(said[1]) if said else memory) * GB, bandwidth * GB)


def utilisation(
    shape: DecoderShape, *, tokens: float, sequences: float, seconds: float, peak: float
) -> float:
    """MFU, 0..1: the step's operations over what the GPUs could have done meanwhile.

    Args:
        tokens: trained on, each as often as it was.
        sequences: that hold them; their mean length stands for T, which is a lower bound.
        seconds: of the step.
        peak: FLOP/s of all GPUs together.
    """
    if not (tokens > 0 and sequences > 0 and seconds > 0):
        return 0.0
    return tokens * shape.flops_per_token(tokens / sequences) / (seconds * peak)


def _within(part: list[str], words: list[str]) -> bool:
    return any(words[i : i + len(part)] == part for i in range(len(words)))
