"""Fifty SFT steps of a tiny Qwen3 in float32: an engine at any allocation against plain torch.

    root = tmp_path; write_model(root / "model")
    expected = plain_losses(root / "model")
    found = engine_losses(root / "model", ["fsdp:d2", "fsdp:d2t2"])
    assert_exact(found["fsdp:d2t2"], expected)

By hand, for the table of docs/training.md: python -m tests.exactness fsdp:d2t2 megatron:t2p2 ...
"""

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shakedown.cluster.allocation import parse_allocation
from shakedown.config import OptimizerConfig
from shakedown.models import huggingface
from shakedown.training.algorithms.sft import negative_log_likelihood
from shakedown.training.batch import TokenBatch, pad_rows, rank_share
from shakedown.training.engines import engine_class, engine_sizes
from shakedown.training.engines.base import NO_OPTIONS, EngineOptions, LossPart, Scores
from tests.forked import fork_ranks, run_ranks

STEPS = 50
ROWS = 8
MICRO_ROWS = 2
VOCABULARY = 64
OPTIMIZER = OptimizerConfig(
    lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=5, max_grad_norm=1.0
)
# Relative difference of the loss that passes as equal, at the first step and at the last.
FIRST, LAST = 1e-5, 1e-3


def write_model(folder: Path) -> Path:
    """Two layers, 64 wide, seeded random weights with norms other than one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from shakedown.training.demo import write_model as write_demo

    write_demo(folder, seed=0)  # for its tokenizer, which engines read
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        for value in model.parameters():
            if value.dim() == 1:
                torch.nn.init.normal_(value, mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return folder


def rows(step: int) -> tuple[list[list[int]], list[int]]:
    """Token lists and how many of each are trained: count on by a stride, which can be learned."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(6, 15, (ROWS,), generator=generator).tolist()
    starts = torch.randint(3, VOCABULARY, (ROWS,), generator=generator).tolist()
    strides = torch.randint(1, 5, (ROWS,), generator=generator).tolist()
    made = [
        [3 + (start - 3 + stride * i) % (VOCABULARY - 3) for i in range(length)]
        for start, stride, length in zip(starts, strides, lengths, strict=True)
    ]
    return made, [length // 2 for length in lengths]


def plain_losses(model: Path, steps: int = STEPS) -> list[float]:
    """The loss of each step by transformers and torch.optim.AdamW alone, row after row."""
    from transformers import AutoModelForCausalLM

    huggingface.quiet()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    first, second = OPTIMIZER.betas
    adamw = torch.optim.AdamW(
        network.parameters(),
        lr=OPTIMIZER.lr,
        betas=(first, second),
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses = []
    for step in range(steps):
        adamw.param_groups[0]["lr"] = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.warmup_steps)
        found = torch.zeros(())
        tokens, trained = rows(step)
        for row, count in zip(tokens, trained, strict=True):
            logits = network(torch.tensor([row])).logits[0, -count - 1 : -1]
            wanted = torch.tensor(row[-count:])
            found = found + torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
        loss = found / sum(trained)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), OPTIMIZER.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def engine_losses(
    model: Path,
    allocations: Sequence[str],
    *,
    steps: int = STEPS,
    options: EngineOptions = NO_OPTIONS,
) -> dict[str, list[float]]:
    """The loss of each step by allocation; each gets its ranks, one allocation after the other.

    All ranks are forked from one process that has imported everything once. Micro batches are of
    MICRO_ROWS rows, or of `options.max_tokens_per_micro_batch` tokens.
    """
    with tempfile.TemporaryDirectory() as root:
        plan = {
            "model": str(model.absolute()),
            "allocations": list(allocations),
            "steps": steps,
            "options": vars(options),
        }
        (Path(root) / "plan.json").write_text(json.dumps(plan))
        run_ranks("tests.exactness", "--plan", root, timeout=300)
        losses: dict[str, list[float]] = json.loads((Path(root) / "losses.json").read_text())
    return losses


def apart(found: Sequence[float], expected: Sequence[float]) -> tuple[float, float]:
    """Relative difference of the loss at the first and at the last step."""
    first, last = (abs(found[i] - expected[i]) / abs(expected[i]) for i in (0, -1))
    return first, last


def assert_exact(found: Sequence[float], expected: Sequence[float]) -> None:
    """Equal within FIRST and LAST, of a run that learned something."""
    assert len(found) == len(expected)
    assert all(map(math.isfinite, found))
    assert expected[-1] < 0.8 * expected[0]
    first, last = apart(found, expected)
    assert first < FIRST, f"first step: {first:.1e} apart"
    assert last < LAST, f"last step: {last:.1e} apart"


def rank_losses(model: Path, allocation: str, *, steps: int, options: EngineOptions) -> list[float]:
    """(collective) This process' part of the steps; the losses are those of all ranks."""
    engine: Any = engine_class(allocation).build(
        model,
        optimizer=OPTIMIZER,
        dtype="float32",
        device=torch.device("cpu"),
        sizes=engine_sizes(allocation),
        options=options,
    )
    losses = []
    for step in range(steps):
        whole = pad_rows(*rows(step), pad=0)
        parts = rank_share(
            whole,
            rank=engine.data_rank,
            world_size=engine.data_world_size,
            micro_batch_size=MICRO_ROWS,
            max_tokens=options.max_tokens_per_micro_batch,
        )

        def loss(scores: Scores, _: TokenBatch, __: int, total: int = whole.trained_tokens) -> Any:
            return LossPart(negative_log_likelihood(scores.logprobs, total), {})

        found = torch.tensor(engine.forward_backward(parts, loss)["loss"], dtype=torch.float64)
        dist.all_reduce(found)
        engine.step()
        losses.append(float(found))
    return losses


def _write_losses(target: Path, model: Path, allocation: str, **keywords: Any) -> None:
    found = rank_losses(model, allocation, **keywords)
    if dist.get_rank() == 0:
        target.write_text(json.dumps(found))


def _run_plan(root: Path) -> None:
    plan = json.loads((root / "plan.json").read_text())
    options = EngineOptions(**plan["options"])
    losses = {}
    for number, allocation in enumerate(plan["allocations"]):
        engine_class(allocation)  # imported here once, not in each rank
        target = root / f"losses-{number}.json"
        work = partial(_write_losses, steps=plan["steps"], options=options)
        world, store = parse_allocation(allocation).gpus, root / f"store-{number}"
        fork_ranks(world, store, work, target, Path(plan["model"]), allocation)
        losses[allocation] = json.loads(target.read_text())
    (root / "losses.json").write_text(json.dumps(losses))


def main(arguments: Sequence[str]) -> None:
    """Print how far each allocation is from plain torch."""
    if arguments[:1] == ["--plan"]:
        _run_plan(Path(arguments[1]))
        return
    with tempfile.TemporaryDirectory() as root:
        model = write_model(Path(root) / "model")
        expected = plain_losses(model)
        print(f"plain torch: {expected[0]:.6f} -> {expected[-1]:.6f}", flush=True)
        for allocation, found in engine_losses(model, arguments).items():
            first, last = apart(found, expected)
            print(f"{allocation}: step 1 {first:.1e}, step {STEPS} {last:.1e}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
