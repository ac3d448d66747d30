"""Ranks of Archon: the same steps at several layouts, in one start.

python archon_ranks.py FOLDER, where FOLDER/plan.json is a list of [ranks, jobs]; those ranks do the
jobs one after the other, each with an engine of its own. A job is {"name", "do" (a function of
JOBS), "model" (a folder in FOLDER), "allocation"} and what it reads; results by name go to
FOLDER/results-N.pt.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shakedown.training import engines
from shakedown.training.batch import TokenBatch, rank_share
from shakedown.training.engines.base import LossPart, Scores
from shakedown.training.engines.sharded_load import local_part
from tests.forked import fork_ranks
from tests.fsdp_ranks import count_collectives
from tests.megatron_ranks import batch, build, continued, two_steps

TEMPERATURE = 0.7
WHOLE = engines.ONE_UNIT_PARAMETERS


def policy_step(engine: Any, rows: int | None = 2) -> dict[str, float]:
    """An update by a ratio that is clipped and an entropy with gradient: `loss` and `norm`.

    Args:
        rows: of a micro batch; None: all of the rank's in one.
    """
    whole = batch()
    share = {"rank": engine.data_rank, "world_size": engine.data_world_size}
    parts = rank_share(whole, **share, micro_batch_size=rows)
    old = engine.logprobs(parts, temperature=TEMPERATURE)

    def loss(scores: Scores, part: TokenBatch, index: int) -> LossPart:
        ratio = (scores.logprobs - old[index] + 0.1).exp()
        advantage = part.tokens[part.mask] % 5 - 2.0
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.1) * advantage)
        return LossPart(-(gain + 0.5 * scores.entropy).sum() / whole.trained_tokens, {})

    found = torch.tensor(
        engine.forward_backward(parts, loss, temperature=TEMPERATURE)["loss"], dtype=torch.float64
    )
    dist.all_reduce(found)
    return {"loss": float(found), "norm": engine.step()}


def _steps(engine: Any, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    start = {name: value.clone() for name, value in engine.gather().items()}
    seen: list[tuple[int, int]] = []

    def see(index: int, run: Sequence[TokenBatch]) -> None:
        seen.append((index, len(run)))

    found = two_steps(engine, folder / job["save"] if "save" in job else None)
    share = {"rank": engine.data_rank, "world_size": engine.data_world_size}
    parts = rank_share(batch(), **share, micro_batch_size=2)
    engine.forward_backward(
        parts, lambda scores, *_: LossPart(scores.logprobs.sum(), {}), on_micro_batch=see
    )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (engine.data_rank, seen, found["logprobs"].tolist()))
    return {**found, "start": start, "ranks": told}


def _continue(engine: Any, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    return {**continued(engine, folder / job["load"]), "updates": engine.updates}


def _policy(engine: Any, _folder: Path, job: dict[str, Any]) -> dict[str, float]:
    return policy_step(engine, job.get("rows", 2))


def _count(_engine: Any, folder: Path, job: dict[str, Any]) -> dict[str, int]:
    return count_collectives(folder / job["model"], job["allocation"], micro_batches=3)


def _copy(engine: Any, _folder: Path, _job: dict[str, Any]) -> dict[str, Any]:
    """What answers held-out rows: its weights, and the largest share of them on a rank."""
    with engine.generator() as found:
        own = sum(local_part(value).numel() for value in found.model.parameters())
        weights = {name: value.full_tensor() for name, value in found.model.named_parameters()}
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, own / sum(value.numel() for value in weights.values()))
    return {"weights": weights, "share": max(shares), "gathered": engine.gather()}


JOBS: dict[str, Callable[[Any, Path, dict[str, Any]], Any]] = {
    "steps": _steps,
    "continue": _continue,
    "copy": _copy,
    "count": _count,
    "policy": _policy,
}


def _one_rank(folder: Path, number: int, jobs: list[Any]) -> None:
    results = {}
    for job in jobs:
        engines.ONE_UNIT_PARAMETERS = 0 if job.get("by_layer") else WHOLE
        dtype = job.get("dtype", "float32")
        engine = build(folder / job["model"], job["allocation"], dtype=dtype)
        results[job["name"]] = JOBS[job["do"]](engine, folder, job)
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{number}.pt")


def main(folder: Path) -> None:
    """Do the plan; all ranks are forked from this process, which has imported everything once."""
    engines.engine_class("archon:d1")
    for number, (world, jobs) in enumerate(json.loads((folder / "plan.json").read_text())):
        fork_ranks(world, folder / f"store-{number}", _one_rank, folder, number, jobs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
