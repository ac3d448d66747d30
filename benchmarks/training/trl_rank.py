"""One rank of TRL's SFTTrainer: `torchrun trl_rank.py PLAN`, or by python for one rank.

PLAN is JSON: `model`, `encoded`, `out` (folder), `rows` (file), `steps`, `batch_size` (of this
rank), `micro_batch_size`, `optimizer`. Rank 0 adds a row to `rows` after every step, as our
trainer does.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Rows(TrainerCallback):  # type: ignore[misc]
    """One JSON row a step, and one for each row of TRL's own log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        self._append({"step": state.global_step}, state)

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_kwargs: Any
    ) -> None:
        self._append({"logged": state.global_step, **logs}, state)

    def _append(self, row: dict[str, Any], state: Any) -> None:
        if state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


def settings(plan: dict[str, Any]) -> SFTConfig:
    """Everything that costs time and is no training is off; the optimizer is ours."""
    optimizer = plan["optimizer"]
    return SFTConfig(
        output_dir=plan["out"],
        max_steps=plan["steps"],
        per_device_train_batch_size=plan["micro_batch_size"],
        gradient_accumulation_steps=plan["batch_size"] // plan["micro_batch_size"],
        optim="adamw_torch_fused",
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["max_grad_norm"],
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        dataloader_pin_memory=False,
        logging_first_step=True,
        logging_steps=plan["steps"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rows = Dataset.from_list(json.loads(Path(plan["encoded"]).read_text(encoding="utf-8")))
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(plan["model"]),
        args=settings(plan),
        train_dataset=rows,
        callbacks=[Rows(Path(plan["rows"]))],
    )
    trainer.train()
    sys.stdout.flush()
    sys.stderr.flush()
    # DDP's reducer ends gloo's group while a thread of gloo waits for the interpreter's lock: seen
    # to hang for ever, after the last step was measured.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
