"""The GPUs that torch sees, and their speed.

    python -m shakedown.preflight.torch_view [--speed [FOLDER]]

Prints one line of JSON. It is a separate process, as torch takes seconds to import and holds the
GPUs. `--speed` measures each GPU: transfers of pinned memory, a copy inside the GPU, and the matrix
products of the model in FOLDER (its config.json) or of a square of 8192.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shakedown.core.files import read_object

_TOKENS = 4096  # rows of a micro-batch of one sequence
_BYTES = 2**28
_SECONDS = 0.1  # each rate is the fastest run within this time


def view() -> dict[str, Any]:
    """Versions, the number of GPUs, and whether each computes."""
    empty = {"version": None, "cuda": None, "nccl": None, "count": 0, "failed": ""}
    try:
        import torch
    except ModuleNotFoundError:
        return {**empty, "failed": "torch is not installed"}
    facts = {**empty, "version": torch.__version__, "cuda": torch.version.cuda}
    facts["count"] = torch.cuda.device_count()
    try:
        if facts["count"]:
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for number in range(facts["count"]):
            ones = torch.ones(64, 64, device=f"cuda:{number}")
            if (ones @ ones).sum().item() != 64.0**3:
                facts["failed"] = f"GPU {number} computes wrong results"
    # torch raises RuntimeError, or AssertionError without a driver; the first line is enough.
    except (RuntimeError, AssertionError) as error:
        facts["failed"] = str(error).splitlines()[0][:300]
    return facts


def speeds(folder: str) -> list[dict[str, Any]]:
    """One row per GPU: `name`, GB/s of transfers and memory, TFLOP/s of each matrix product."""
    import torch

    shapes = gemm_shapes(Path(folder) / "config.json") if folder else [(8192, 8192, 8192)]
    return [_speed(torch, number, shapes) for number in range(torch.cuda.device_count())]


def gemm_shapes(config: Path) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of a layer's matrix products: attention output, MLP up and down.

    Raises:
        UsageError: no such file, or it is not a JSON object.
    """
    body = read_object(config, "model config")
    hidden = int(body.get("hidden_size") or 8192)
    inner = int(body.get("intermediate_size") or 4 * hidden)
    return [(_TOKENS, hidden, hidden), (_TOKENS, hidden, inner), (_TOKENS, inner, hidden)]


def _speed(torch: Any, number: int, shapes: list[tuple[int, int, int]]) -> dict[str, Any]:
    device = torch.device("cuda", number)
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.empty(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def rate(work: Callable[[], Any], size: float) -> float:
        """The rate of the fastest run, in `size` units per second."""
        work()  # the first run loads kernels: 0.1 s for a matrix product on an H200
        best, end = float("inf"), time.monotonic() + _SECONDS
        while time.monotonic() < end or best == float("inf"):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
        return round(size / best, 1)

    row: dict[str, Any] = {
        "name": torch.cuda.get_device_name(number),
        "to_gpu_gb_s": rate(lambda: here.copy_(host, non_blocking=True), _BYTES / 1e9),
        "to_host_gb_s": rate(lambda: host.copy_(here, non_blocking=True), _BYTES / 1e9),
        "memory_gb_s": rate(lambda: there.copy_(here), 2 * _BYTES / 1e9),  # read and written
    }
    for rows, inner, columns in shapes:
        left = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        right = torch.randn(inner, columns, device=device, dtype=torch.bfloat16)
        product = partial(torch.matmul, left, right)
        name = f"gemm {rows}x{inner}x{columns} tflop_s"
        row[name] = rate(product, 2 * rows * inner * columns / 1e12)
    return row


def main() -> None:
    """Print the facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", nargs="?", const="", metavar="FOLDER")
    args = parser.parse_args()
    facts = view()
    facts["devices"] = []
    if args.speed is not None and facts["count"] and not facts["failed"]:
        facts["devices"] = speeds(args.speed)
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
