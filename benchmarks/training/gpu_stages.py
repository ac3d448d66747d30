"""An SFT and a GRPO stage on one GPU, its vLLM server beside it: measured against `train --plan`.

The model has a Qwen3's shape, random weights and a tokenizer with a token for every id. Its random
answers end at their longest: what is measured is the work, not what is learned.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.gpu import QWEN3_06B
from training.gpu import TINY as TINY_SHAPE
from training.grpo import StageFailedError, rows_of, run_shakedown, write_json

WARMUP = 2  # steps in which kernels are chosen and caches fill
_REWARD = """
import zlib

def reward(completion, answer):
    return float(zlib.crc32(completion.encode()) % 2)  # differs within a group
"""


@dataclass(frozen=True)
class Load:
    """`length`: tokens of an SFT row, and of a GRPO prompt with its answer. `share`: of the GPU's
    memory for the server; None: on a CPU.
    """

    model: Mapping[str, Any] = field(default_factory=lambda: QWEN3_06B)
    length: int = 4096
    answer: int = 1024
    rows: int = 8
    micro_batch: int = 2
    prompts: int = 8
    group: int = 8
    steps: int = 5
    share: float | None = 0.4


@dataclass(frozen=True)
class Stage:
    """Medians of a step behind the warm-up; `publish_s`, `load_s`: of GRPO's weights by trainer
    and server. GB are 10^9 bytes that torch had allocated in the trainer.
    """

    stage: str
    step_s: float
    tokens_per_s: float
    mfu: float | None
    wait_s: float
    publish_s: float
    load_s: float
    generated_per_s: float
    peak_gb: float
    planned_gb: float
    planned_mfu: float | None
    planned_tokens_per_s: float | None


# The same code on a CPU.
TINY = Load(
    model={**TINY_SHAPE, "head_dim": 32},  # vLLM's CPU attention has no smaller one
    length=96,
    answer=16,
    rows=4,
    prompts=4,
    group=4,
    steps=4,
    share=None,
)


def measure(folder: Path, load: Load, device: str) -> list[Stage]:
    """Both stages, GRPO after SFT.

    Args:
        device: the GPU's name, as `cluster.gpu_model` takes it; empty: a CPU.

    Raises:
        StageFailedError: a stage failed.
    """
    model = folder / "model"
    write_shape(model, load)
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
    data = folder / "rows.jsonl"
    write_rows(data, load)
    config = write_json(folder / "config.yaml", config_of(folder, load, device))
    run_shakedown(["assets", "--config", str(config), "--out", str(folder / "assets")], folder)
    return [_run(folder, name, config) for name in ("sft", "grpo")]


def write_shape(folder: Path, load: Load) -> None:
    """Random weights, and a tokenizer that has a word for each id."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        max_position_embeddings=load.length + 1,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        **load.model,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(1, load.model["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, **words}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # joins words by blanks
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        model_max_length=load.length,
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def write_rows(path: Path, load: Load) -> None:
    """Prompts that leave room for the longest answer; as SFT rows of nearly `length` tokens."""
    draw, size = random.Random(0), load.model["vocab_size"]

    def words(number: int) -> str:
        return " ".join(f"w{draw.randrange(1, size)}" for _ in range(number))

    rows = [
        {
            "messages": [{"role": "user", "content": words(load.length - load.answer - 8)}],
            "answer": words(load.answer),
        }
        for _ in range(4 * load.rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config_of(folder: Path, load: Load, device: str) -> dict[str, Any]:
    """Both stages, as the `qwen3-2x8-h100.yaml` example has them, on one GPU or CPU rank."""
    common = {
        "allocation": "fsdp:d1",
        "steps": load.steps,
        "micro_batch_size": load.micro_batch,
        "activation_checkpointing": True,
        "checkpoint_every": load.steps,
        "eval_samples": 0,
        "optimizer": {"lr": 0.0001},
        "stall_timeout": 300.0,
    }
    grpo: dict[str, Any] = {
        "group_size": load.group,
        "max_tokens": load.answer,
        "epochs": 1,
        "async_level": 0,
    }
    extra = [] if load.share is None else [f"--gpu-memory-utilization={load.share}"]
    return {
        "run": "gpu",
        "results": str(folder),
        "model": {"source": str(folder / "model"), "dtype": "bfloat16"},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "heldout": str(folder / "rows.jsonl"),
            "reward": f"{folder / 'reward.py'}:reward",
        },
        "cluster": {"gpus_per_node": int(bool(device)), "gpu_model": device},
        "serve": {
            "share_gpus": bool(device),
            "max_model_len": load.length,
            "extra_args": extra,
        },
        "order": [],
        "stages": {
            # Its activations whole, so that both ways are held against the plan.
            "sft": {
                "algorithm": "sft",
                "batch_size": load.rows,
                **common,
                "activation_checkpointing": False,
            },
            "grpo": {"algorithm": "grpo", "batch_size": load.prompts, "grpo": grpo, **common},
        },
    }


def _run(folder: Path, name: str, config: Path) -> Stage:
    assets = folder / "assets" / "assets.json"
    command = ["train", name, "--config", str(config), "--assets", str(assets)]
    # Exit code 1 says that it does not fit: measured all the same.
    said = subprocess.run(
        [sys.executable, "-m", "shakedown.cli", *command, "--plan", "--json"],
        capture_output=True,
        check=False,
    )
    planned = json.loads(said.stdout or b"null")
    if not planned:
        raise StageFailedError(f"train {name} --plan: {said.stderr.decode()}")
    run = folder / "run"
    run_shakedown([*command, "--run-dir", str(run)], run)
    return summary(name, rows_of(run / "stages" / name / "metrics.jsonl"), planned)


def summary(name: str, rows: Sequence[Mapping[str, float]], planned: Mapping[str, Any]) -> Stage:
    """What a stage's metrics say beside its plan.

    Raises:
        StageFailedError: too few steps.
    """
    steady = rows[WARMUP:]
    if not steady:
        raise StageFailedError(f"{name}: {len(rows)} steps are too few")

    def median(key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in steady)

    trainer = sum(planned["moments"][planned["moment"]].values())
    return Stage(
        stage=name,
        step_s=median("step_seconds"),
        tokens_per_s=median("tokens_per_second"),
        mfu=median("mfu") if "mfu" in steady[0] else None,
        wait_s=median("wait_seconds"),
        publish_s=median("sync_seconds"),
        load_s=median("rollout_weight_update_seconds"),
        generated_per_s=statistics.median(
            row["trained_tokens"] / row["wait_seconds"] if name == "grpo" else 0.0 for row in steady
        ),
        peak_gb=max(row["memory_max_gb"] for row in rows) * 2**30 / 1e9,
        planned_gb=trainer / 1e9,
        planned_mfu=planned["mfu"],
        planned_tokens_per_s=planned["tokens_per_second"],
    )


def table(stages: Sequence[Stage]) -> str:
    """A Markdown table, a row a stage."""
    head = ["stage", "s a step", "tokens/s", "MFU", "planned", "wait for rollouts", "generated/s"]
    head += ["publish s", "server loads s", "peak GB", "planned"]
    rows = [head, ["---"] * len(head)]
    for one in stages:
        rows.append(
            [
                one.stage,
                f"{one.step_s:.2f}",
                f"{one.tokens_per_s:.0f}",
                *("-" if mfu is None else f"{mfu:.1%}" for mfu in (one.mfu, one.planned_mfu)),
                f"{one.wait_s:.2f}",
                f"{one.generated_per_s:.0f}",
                f"{one.publish_s:.2f}",
                f"{one.load_s:.2f}",
                f"{one.peak_gb:.2f}",
                f"{one.planned_gb:.2f}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
