"""Two ranks that take the same steps at several layouts and write down what came out.

python -m tests.megatron_ranks FOLDER, where FOLDER/plan.json is a list of jobs:
{"name", "model" (a folder in FOLDER), "allocation", "options", "save": bool, "load": bool,
"reference": bool, "max_tokens": of a micro batch}; what is saved in one job is loaded in later
ones, and one with a reference updates by GRPO beside a frozen model. Results go to
FOLDER/results.pt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shakedown.config import GrpoConfig, OptimizerConfig, StageConfig
from shakedown.rollout.batch import RolloutBatch
from shakedown.training.algorithms.grpo import token_batch
from shakedown.training.algorithms.policy_update import PolicyUpdate, ReferenceModel
from shakedown.training.algorithms.sft import negative_log_likelihood
from shakedown.training.batch import TokenBatch, pad_rows, rank_share
from shakedown.training.coordination import Ranks
from shakedown.training.engines import engine_class, engine_sizes
from shakedown.training.engines.base import EngineOptions, LossPart, Scores
from shakedown.training.stage.job import StageJob
from tests.forked import fork_ranks

OPTIMIZER = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)
CPU = torch.device("cpu")


def batch() -> TokenBatch:
    """Rows of several lengths, one with nothing to train; the last micro batch has one row."""
    generator = torch.Generator().manual_seed(1)
    lengths, trained = (9, 5, 12, 7, 3, 8, 6), (3, 2, 6, 0, 1, 7, 2)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]
    return pad_rows(rows, trained, pad=0)


def build(folder: Path, allocation: str, **keywords: Any) -> Any:
    """The engine of an allocation, on the CPU in float32."""
    return engine_class(allocation).build(
        folder,
        optimizer=OPTIMIZER,
        dtype=keywords.pop("dtype", "float32"),
        device=CPU,
        sizes=engine_sizes(allocation),
        **keywords,
    )


def sft_step(engine: Any, max_tokens: int | None = None) -> dict[str, float]:
    """One update on the batch, two rows a micro batch: `loss`, `entropy`, `norm` of all ranks.

    Args:
        max_tokens: of a micro batch, instead of two rows.
    """
    whole = batch()
    parts = rank_share(
        whole,
        rank=engine.data_rank,
        world_size=engine.data_world_size,
        micro_batch_size=2,
        max_tokens=max_tokens,
    )

    def loss(scores: Scores, _batch: TokenBatch, _index: int) -> LossPart:
        total = whole.trained_tokens
        entropy = scores.entropy.sum() / total
        return LossPart(negative_log_likelihood(scores.logprobs, total), {"entropy": entropy})

    sums = engine.forward_backward(parts, loss)
    values = torch.tensor([sums["loss"], sums["entropy"]], dtype=torch.float64)
    dist.all_reduce(values)
    return {"loss": float(values[0]), "entropy": float(values[1]), "norm": engine.step()}


def two_steps(
    engine: Any, saved: Path | None = None, max_tokens: int | None = None
) -> dict[str, Any]:
    """Logprobs of the whole batch, then two updates; saves between them where `saved` is given.

    Between them the weights from before the first are set, asked and taken back.
    """
    logprobs = engine.logprobs([batch()])[0]
    before = engine.copy_weights()
    first = sft_step(engine, max_tokens)
    after = engine.copy_weights()
    engine.set_weights(before)
    again = engine.logprobs([batch()])[0]
    engine.set_weights(after)
    # On one rank FSDP hands out the weights themselves, which the second step changes.
    weights = {name: value.detach().clone() for name, value in engine.gather().items()}
    if saved is not None:
        save_now(engine, saved)
    return {
        "logprobs": logprobs,
        "again": again,
        "first": first,
        "weights": weights,
        "second": sft_step(engine, max_tokens),
    }


def save_now(engine: Any, folder: Path) -> None:
    """(collective) Take a snapshot and write it while everybody waits."""
    snapshot = engine.snapshot()
    snapshot.write(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        snapshot.complete(folder)
    dist.barrier()


def continued(engine: Any, saved: Path) -> dict[str, Any]:
    """Load what `two_steps` saved, and take its second step."""
    engine.load(saved, updates=1)
    return {"weights": engine.gather(), "second": sft_step(engine)}


def rollouts() -> RolloutBatch:
    """Three groups of two answers of one to four tokens, with unlike rewards."""
    draw = np.random.default_rng(3)
    places, prompts = np.arange(8), draw.integers(2, 5, 6)
    ends = prompts + np.array([4, 1, 3, 2, 4, 3])
    mask = (places >= prompts[:, None]) & (places < ends[:, None])
    return RolloutBatch(
        step=1,
        versions=np.zeros(6, dtype=np.int64),
        tokens=np.where(places < ends[:, None], draw.integers(3, 90, (6, 8)), 0),
        loss_mask=mask,
        logprobs=np.where(mask, draw.normal(-4.5, 0.5, (6, 8)), 0).astype(np.float32),
        rewards=np.array([1, 0, 0, 1, 0.5, 0.25], dtype=np.float32),
        groups=np.repeat(np.arange(3), 2),
    )


def held_to_reference(folder: Path, allocation: str) -> dict[str, Any]:
    """Two GRPO updates with a KL term: what the reference says before and after, and the rows."""
    settings = GrpoConfig(kl_coef=0.5)
    stage = StageConfig(
        algorithm="grpo",
        allocation=allocation,
        steps=2,
        batch_size=6,
        optimizer=OPTIMIZER,
        grpo=settings,
    )
    engine = build(folder, allocation)
    job = StageJob("grpo", stage, str(folder), "float32", "", "", "", 0, 1, "", "")
    reference = ReferenceModel(job, CPU)
    ranks = Ranks(dist.HashStore(), device=CPU, key=b"")  # rank 0 decides nothing here
    update = PolicyUpdate(engine, ranks, settings, micro_batch_size=2, reference=reference)

    def silent(_index: int, _run: object) -> None:
        pass

    def said(model: Any, **keywords: Any) -> torch.Tensor:
        found: torch.Tensor = model.logprobs([batch()], **keywords)[0].clone()
        return found

    def by_reference() -> torch.Tensor:
        return said(reference, temperature=1.0, on_micro_batch=silent)

    before, rows = by_reference(), []
    for _ in range(2):
        sums, values = update.run(token_batch(rollouts(), pad=0), lambda _parts: silent)
        rows.append(ranks.sum(sums) | values)
    return {"before": before, "after": by_reference(), "policy": said(engine), "rows": rows}


def run(folder: Path, plan: list[dict[str, Any]]) -> dict[str, Any]:
    """Do each job of the plan; results by its name."""
    results = {}
    for job in plan:
        if job.get("reference"):
            results[job["name"]] = held_to_reference(folder / job["model"], job["allocation"])
            continue
        options = EngineOptions(**job.get("options", {}))
        engine = build(folder / job["model"], job["allocation"], options=options)
        saved = folder / "saved" if job.get("save") or job.get("load") else None
        if saved is not None and job.get("load"):
            results[job["name"]] = continued(engine, saved)
        else:
            results[job["name"]] = two_steps(engine, saved, job.get("max_tokens"))
    return results


def work(folder: Path) -> None:
    """One of two ranks: do the plan, write the results on rank 0."""
    results = run(folder, json.loads((folder / "plan.json").read_text()))
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    engine_class("megatron:d1")  # imported once, before the ranks are forked
    fork_ranks(2, Path(sys.argv[1]) / "store", work, Path(sys.argv[1]))
