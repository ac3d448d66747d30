"""A load test of a node's processors: matrix products whose bits must be equal each time.

It runs on every GPU that torch sees, or on the CPU if it sees none; the judge knows which was
expected.
"""

import time
from typing import Any

import torch

_CPU_SIZE, _GPU_SIZE = 1024, 8192
_TIMES = 3  # times at which the speed is measured, as a passing load is not the processor's fault


def devices() -> list[str]:
    """`cuda:0`, `cuda:1`, ...; `cpu` if torch sees no GPU."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def measure_device(name: str, seconds: float) -> dict[str, Any]:
    """Repeat one product for `seconds`.

    Returns:
        `kind`: the processor's name. `gflops`: the median GFLOP/s of each third of the time.
        `stable`: whether every product had the same bits as the first.
    """
    device = torch.device(name)
    gpu = device.type == "cuda"
    found = [_products(device, seconds / _TIMES) for _ in range(_TIMES)]
    return {
        "kind": torch.cuda.get_device_name(device) if gpu else "cpu",
        "gflops": [round(rate, 1) for rate, _ in found],
        "stable": all(stable for _, stable in found),
    }


def _products(device: torch.device, seconds: float) -> tuple[float, bool]:
    """(median GFLOP/s, whether every product had the first one's bits)."""
    gpu = device.type == "cuda"
    size, dtype = (_GPU_SIZE, torch.bfloat16) if gpu else (_CPU_SIZE, torch.float32)
    # Made on the CPU, so that all devices of all nodes have the same input.
    left = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    left = left.to(device=device, dtype=dtype)
    first = left @ left
    stable = True
    rates: list[float] = []
    end = time.monotonic() + seconds
    while not rates or time.monotonic() < end:
        _wait_for(device)
        begin = time.perf_counter()
        again = left @ left
        _wait_for(device)
        # 2 n^3: a multiplication and an addition each.
        rates.append(2 * size**3 / (time.perf_counter() - begin) / 1e9)
        stable = stable and torch.equal(first, again)
    return sorted(rates)[len(rates) // 2], stable


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
