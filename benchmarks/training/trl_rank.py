"""One rank of TRL's SFTTrainer or GRPOTrainer: `torchrun trl_rank.py PLAN`, or by python for one.

PLAN is JSON: `trainer` (sft | grpo), `model`, `out` (folder), `rows` (file), `steps`, `batch_size`
and `micro_batch_size` (of this rank), `optimizer`; for SFT `encoded`; for GRPO `prompts` (file),
`group_size`, `epochs`, `max_tokens`, `clip`, and `rollouts`, a file of samples to be trained on
instead of generating any, or null. Rank 0 adds a row to `rows` after every update, as our trainer
does after every step, and one for each row of TRL's own log.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from shakedown.agents.rewards.answers import exact_match


class Rows(TrainerCallback):  # type: ignore[misc]
    """One JSON row an update, and one for each row of TRL's own log."""

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


class WithAdvantages(GRPOTrainer):  # type: ignore[misc]
    """Writes the advantages that it made of its first samples beside `rows`."""

    advantages: Path

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if not self.advantages.exists():
            self.advantages.write_text(json.dumps(made["advantages"].tolist()), encoding="utf-8")
        return made


def common(plan: dict[str, Any]) -> dict[str, Any]:
    """Everything that costs time and is no training is off; the optimizer is ours."""
    optimizer = plan["optimizer"]
    return {
        "output_dir": plan["out"],
        "per_device_train_batch_size": plan["micro_batch_size"],
        "gradient_accumulation_steps": plan["batch_size"] // plan["micro_batch_size"],
        "optim": "adamw_torch_fused",
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "weight_decay": optimizer["weight_decay"],
        "max_grad_norm": optimizer["max_grad_norm"],
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def sft(plan: dict[str, Any]) -> Any:
    """Batches of the rows as they stand in `encoded`."""
    settings = SFTConfig(
        **common(plan),
        max_steps=plan["steps"],
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        logging_first_step=True,
        logging_steps=plan["steps"],
    )
    return SFTTrainer(args=settings, train_dataset=_rows(plan["encoded"]), **_model(plan))


def grpo(plan: dict[str, Any]) -> Any:
    """Steps of `epochs` updates on the samples of the prompts as they stand in `prompts`."""
    low, high = plan["clip"]
    settings = GRPOConfig(
        **common(plan),
        max_steps=plan["steps"] * plan["epochs"],
        num_iterations=plan["epochs"],
        num_generations=plan["group_size"],
        max_completion_length=plan["max_tokens"],
        shuffle_dataset=False,
        epsilon=low,
        epsilon_high=high,
        loss_type="dapo",  # the mean over all tokens of the batch
        beta=0.0,
        logging_steps=1,
    )
    given: dict[str, Any] = {"args": settings, "train_dataset": _rows(plan["prompts"])}
    given |= _model(plan)
    if not plan["rollouts"]:
        return GRPOTrainer(reward_funcs=_judge, **given)
    recorded = json.loads(Path(plan["rollouts"]).read_text(encoding="utf-8"))
    trainer = WithAdvantages(
        reward_funcs=_recorded_reward, rollout_func=lambda *_: dict(recorded), **given
    )
    trainer.advantages = Path(plan["rows"]).with_name("advantages.json")
    return trainer


def _model(plan: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(plan["model"]),
        "callbacks": [Rows(Path(plan["rows"]))],
    }


def _rows(path: str) -> Dataset:
    return Dataset.from_list(json.loads(Path(path).read_text(encoding="utf-8")))


def _judge(completions: list[Any], answer: list[str], **_given: Any) -> list[float]:
    said = [completion[0]["content"] for completion in completions]
    return [exact_match(text, expected) for text, expected in zip(said, answer, strict=True)]


def _recorded_reward(completions: list[Any], reward: list[float], **_given: Any) -> list[float]:
    return reward[: len(completions)]


def main() -> None:
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    {"sft": sft, "grpo": grpo}[plan["trainer"]](plan).train()
    sys.stdout.flush()
    sys.stderr.flush()
    # DDP's reducer ends gloo's group while a thread of gloo waits for the interpreter's lock: seen
    # to hang for ever, after the last step was measured.
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
