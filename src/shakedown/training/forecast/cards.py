"""Memory of GPUs by model: one row each, from their makers' data sheets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shakedown.training.metrics.flops import known_gpu

GB = 10**9
# Name of metrics/flops.py -> (GB of memory, GB/s of its bandwidth), the same sheets as there. Of
# A100s with 40 and 80 GB the smaller stands here, unless the name says 80GB. Looked up on
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
KNOWN = tuple(name.lower().replace(" ", "_") for name in _CARDS)


@dataclass(frozen=True)
class Card:
    """`memory`: bytes. Drivers show some 6 % more than the sheet's GB (81,559 MiB of an H100's 80
    GB), which is left for what is not planned: CUDA's contexts, NCCL's buffers, the allocator.
    `bandwidth`: bytes per second.
    """

    name: str
    memory: int
    bandwidth: int


def card_of(gpu: str) -> Card | None:
    """The card by its name in Slurm's gres or the driver, such as h100; None if not known."""
    name = known_gpu(gpu)
    if name is None:
        return None
    memory, bandwidth = _CARDS[name]
    said = re.search(r"(\d+)GB", gpu.upper())
    return Card(name, (int(said[1]) if said else memory) * GB, bandwidth * GB)
