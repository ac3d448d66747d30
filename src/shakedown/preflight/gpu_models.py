"""The speeds that GPUs should reach, one row per model, each number with its source."""

import re
from dataclasses import dataclass

AZNHC = "AzNHC"  # github.com/Azure/azurehpc-health-checks, conf/
SHEET = "NVIDIA's data sheet"
# Least share of the data sheet's memory bandwidth (ours: a copy inside the GPU reaches 85 to 92 %).
MIN_MEMORY_SHARE = 0.7


@dataclass(frozen=True)
class GpuModel:
    """Numbers of one model, in GB/s.

    Attributes:
        name: part of the driver's product name, without blanks and in lower case.
        host: least transfer between main memory and GPU, pinned.
        memory: bandwidth of the GPU's memory according to the data sheet.
        all_reduce: least bus bandwidth of an all-reduce over the node's eight GPUs.
        source: the source of `host` and `all_reduce`; `memory` is from NVIDIA's data sheet.
    """

    name: str
    host: float
    memory: float
    all_reduce: float
    source: str


# The first match counts, so longer names come first.
GPU_MODELS = (
    GpuModel("gb200", 48, 8000, 432, "AzNHC nd128isr_ndr_gb200_v6.conf"),
    GpuModel("h200", 48, 4800, 431, "AzNHC nd96isr_h200_v5.conf"),
    GpuModel("h10080gbhbm3", 48, 3350, 460, "AzNHC nd96isr_h100_v5.conf"),
    GpuModel("a100sxm480gb", 24, 2039, 228, "AzNHC nd96amsr_a100_v4.conf"),
)


def plain(name: str) -> str:
    """A GPU's name in the form for comparisons: `NVIDIA H100 80GB HBM3` -> `nvidiah10080gbhbm3`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def model_of(name: str) -> GpuModel | None:
    """The row for a product name; None if no numbers are known."""
    return next((row for row in GPU_MODELS if row.name in plain(name)), None)


def is_model(name: str, wanted: str) -> bool:
    """Whether a product name matches Slurm's gres name `wanted`: `h200`, `nvidia_h100_80gb`."""
    return plain(wanted) in plain(name)
