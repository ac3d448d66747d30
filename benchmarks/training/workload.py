"""What both sides train on: a small Qwen3 with random weights, and rows of random characters."""

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
# 1.25M parameters with the demo's 98 characters as vocabulary.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 408,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0, "max_grad_norm": 1.0}


@dataclass(frozen=True)
class Workload:
    """Steps of `batch_size` rows over all ranks; the first `warmup` steps are not counted.

    `micro_batch_size`: rows of a forward pass. `longest`: characters of the longest row; the
    shortest has half of them.
    """

    steps: int = 15
    warmup: int = 3
    batch_size: int = 32
    micro_batch_size: int = 8
    longest: int = 128


@dataclass(frozen=True)
class Written:
    """What lies in a folder. `tokens`: of each step's global batch, without padding."""

    assets: Path
    model: Path
    encoded: Path
    parameters: int
    tokens: Sequence[int]


def write(folder: Path, load: Workload) -> Written:
    """Model, rows as we read them, and the same rows encoded in the order of our steps."""
    parameters = _write_model(folder / "model")
    rows = random_rows(load, seed=SEED)
    train = folder / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sources = {"model": str(folder / "model"), "train": str(train), "heldout": str(train)}
    assets = folder / "assets.json"
    assets.write_text(json.dumps({"schema": "shakedown/assets/1", **sources}), encoding="utf-8")
    encoded = folder / "encoded.json"
    ordered = _encoded(folder / "model", train)
    encoded.write_text(json.dumps(ordered), encoding="utf-8")
    lengths = [len(row["input_ids"]) for row in ordered]
    size = load.batch_size
    tokens = [sum(lengths[at : at + size]) for at in range(0, len(lengths), size)]
    return Written(assets, folder / "model", encoded, parameters, tokens)


def random_rows(load: Workload, *, seed: int) -> list[dict[str, Any]]:
    """Every row once: half of it prompt, half answer; lengths uniform from half to all."""
    draw = random.Random(seed)
    letters = string.ascii_letters + string.digits

    def text(length: int) -> str:
        return "".join(draw.choices(letters, k=length))

    rows = []
    for _ in range(load.steps * load.batch_size):
        length = draw.randint(load.longest // 2, load.longest)
        messages = [{"role": "user", "content": text(length // 2)}]
        rows.append({"messages": messages, "answer": text(length - length // 2)})
    return rows


def _write_model(folder: Path) -> int:
    """The demo's tokenizer with a larger model; returns the number of parameters."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from shakedown.training.demo import MAX_POSITIONS, write_model

    write_model(folder, seed=SEED)
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SHAPE,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def _encoded(model: Path, train: Path) -> list[dict[str, list[int]]]:
    """Rows as token ids and labels (-100 where nothing is trained), in the order of our steps."""
    from transformers import AutoTokenizer

    from shakedown.data_sources import epoch_order, load_rows
    from shakedown.models.chat import encode_row

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_rows(str(train))
    encoded = []
    for number in epoch_order(len(rows), seed=SEED, epoch=0):
        row = encode_row(tokenizer, rows[number])
        if len(row.tokens) > tokenizer.model_max_length:
            raise ValueError(f"row {number} is longer than {tokenizer.model_max_length} tokens")
        ((start, _),) = row.spans
        labels = [-100] * start + row.tokens[start:]
        encoded.append({"input_ids": row.tokens, "labels": labels})
    return encoded


def stage_config(folder: Path, load: Workload, *, ranks: int) -> dict[str, Any]:
    """A run with one SFT stage; nothing but the steps themselves between the first and the last."""
    stage = {
        "algorithm": "sft",
        "allocation": f"fsdp:d{ranks}",
        "steps": load.steps,
        "batch_size": load.batch_size,
        "micro_batch_size": load.micro_batch_size,
        "optimizer": OPTIMIZER,
        "checkpoint_every": load.steps,
        "eval_samples": 0,
    }
    return {
        "run": "bench",
        "results": str(folder),
        "seed": SEED,
        "model": {"source": "demo"},
        "data": {"train": "demo", "heldout": "demo"},
        "agents": {"target": "module:Unused"},
        "stages": {"sft": stage},
    }
