"""Four ranks of FSDP at several layouts: `python -m tests.fsdp_ranks FOLDER` with a plan in it.

FOLDER/plan.json is a list of jobs {"name", "model", "allocation", "options", "dtype", "save",
"load"}; what one job saves under a name, later ones load. Results go to FOLDER/results.pt; "start"
are the weights before the first step, "read" how many numbers each rank read of the model folder.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.utils._python_dispatch import TorchDispatchMode

from shakedown.training import engines
from shakedown.training.engines.base import EngineOptions, LossPart
from tests.forked import fork_ranks
from tests.megatron_ranks import batch, build, continued, two_steps

WORLD = 4


class CountCollectives(TorchDispatchMode):  # type: ignore[misc]
    """Calls into process groups, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_reads() -> Iterator[list[int]]:
    """Sizes of the slices that torch's reader takes out of safetensors files."""
    sizes: list[int] = []
    before = HuggingFaceStorageReader._process_read_request

    def count(self: Any, archive: Any, request: Any, planner: Any) -> None:
        sizes.append(math.prod(request.lengths))
        before(self, archive, request, planner)

    HuggingFaceStorageReader._process_read_request = count
    try:
        yield sizes
    finally:
        HuggingFaceStorageReader._process_read_request = before


def count_collectives(folder: Path, allocation: str, *, micro_batches: int) -> dict[str, int]:
    """(collective) Those of one `forward_backward`, by name, on this rank."""
    engine = build(folder, allocation)

    def loss(scores: Any, *_: Any) -> LossPart:
        return LossPart(scores.logprobs.sum(), {})

    with CountCollectives() as counted:
        engine.forward_backward([batch()] * micro_batches, loss)
    return dict(counted.found)


def _jobs(folder: Path, plan: list[dict[str, Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for job in plan:
        options = EngineOptions(**job.get("options", {}))
        with count_reads() as sizes:
            engine = build(
                folder / job["model"],
                job["allocation"],
                options=options,
                dtype=job.get("dtype", "float32"),
            )
        start = {name: value.clone() for name, value in engine.gather().items()}
        read: list[Any] = [None] * WORLD
        dist.all_gather_object(read, sum(sizes))
        if job.get("load"):
            results[job["name"]] = continued(engine, folder / job["load"])
        else:
            saved = folder / job["save"] if job.get("save") else None
            results[job["name"]] = two_steps(engine, saved) | {"start": start, "read": read}
    return results


def _counts(folder: Path) -> dict[str, dict[str, int]]:
    """Of one and of three micro batches; the whole model as one unit, and layer by layer."""
    model, found = folder / "qwen3", {}
    for unit, limit in (("one unit", engines.ONE_UNIT_PARAMETERS), ("layers", 0)):
        engines.ONE_UNIT_PARAMETERS = limit
        for number in (1, 3):
            found[f"{unit} {number}"] = count_collectives(model, "fsdp:d4", micro_batches=number)
    return found


def work(folder: Path) -> None:
    """One rank's part; rank 0 writes what came out."""
    results = _jobs(folder, json.loads((folder / "plan.json").read_text()))
    results["counts"] = _counts(folder)
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    engines.engine_class("fsdp:d1")
    fork_ranks(WORLD, Path(sys.argv[1]) / "store", work, Path(sys.argv[1]))
