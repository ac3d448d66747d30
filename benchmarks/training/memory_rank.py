"""One rank of a memory measurement: `memory_rank.py FOLDER`, with FOLDER/plan.json.

It does two updates of random tokens, publishes its weights twice as GRPO does, and writes its
resident memory by kind to FOLDER/rank-N.json.
Pages of files are left out: code of torch that is run for the first time is no memory of the model
(some 20 MiB). The kinds are those of `memory.py`; the second update is measured, when every buffer
is made.
"""

import ctypes
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shakedown.config import OptimizerConfig
from shakedown.rollout.store import RolloutStore
from shakedown.training.batch import TokenBatch, pad_rows
from shakedown.training.engines import engine_class, engine_sizes
from shakedown.training.engines.base import LossPart, Scores

_STATUS = Path("/proc/self/status")


def resident(key: str = "VmRSS") -> int:
    """Bytes now, without pages of files; with VmHWM the most since `forget`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    told = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    # Nothing is loaded any more where the most is asked for: it had the same files as now.
    return (int(told[key].split()[0]) - int(told["RssFile"].split()[0])) * 1024


def forget() -> None:
    """Begin VmHWM anew: proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def step(engine: Any, batches: Sequence[TokenBatch], note: Callable[[], None]) -> None:
    """Forward and backward of all micro batches; `note` before the last one."""

    def loss(scores: Scores, *_: Any) -> LossPart:
        return LossPart(-scores.logprobs.sum(), {"entropy": scores.entropy.detach().sum()})

    def begin(index: int, _: Sequence[TokenBatch]) -> None:
        if index == len(batches) - 1 > 0:
            note()

    engine.forward_backward(batches, loss, on_micro_batch=begin)


def publish(engine: Any, folder: Path) -> dict[str, float]:
    """(collective) The second time of two: seconds, bytes of the files, and what the first grew."""
    store, before = RolloutStore(folder), resident()
    forget()
    for version in (1, 2):
        began = time.monotonic()
        weights = engine.gather(engine.torch_dtype)
        if dist.get_rank() == 0:
            store.publish_weights(version, functools.partial(engine.export, weights=weights))
        seconds = time.monotonic() - began
        del weights
        if version == 1:
            grew = resident("VmHWM") - before
    written = sum(path.stat().st_size for path in folder.rglob("*2/*.safetensors"))
    return {"seconds": seconds, "bytes": written, "grew": grew}


def measure(plan: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """(collective) Bytes by kind, and `publish`."""
    allocation, length = plan["allocation"], plan["length"]
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        pad_rows(
            torch.randint(3, 90, (plan["rows"], length), generator=draw).tolist(),
            [length - 1] * plan["rows"],
            pad=0,
        )
        for _ in range(plan["micro_batches"])
    ]
    kind, empty = engine_class(allocation), resident()
    engine = kind.build(
        Path(plan["model"]),
        optimizer=OptimizerConfig(lr=1e-4),
        dtype="float32",
        device=torch.device("cpu"),
        sizes=engine_sizes(allocation),
    )
    loaded = resident()
    step(engine, batches, lambda: None)
    engine.step()
    updated = resident()
    between: list[int] = []
    forget()
    step(engine, batches, lambda: between.append(resident()))
    peak = resident("VmHWM")
    kinds = {
        "weights": loaded - empty,
        "between micro batches": max(between, default=updated) - updated,
        "peak of the step": peak - updated,
        "optimizer": updated - loaded,
    }
    return {"kinds": kinds, "publish": publish(engine, folder / "exchange")}


def main(folder: Path) -> None:
    """Join the others, measure, write."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - not to be counted as weights

    found = measure(json.loads((folder / "plan.json").read_text(encoding="utf-8")), folder)
    target = folder / f"rank-{os.environ['RANK']}.json"
    target.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
