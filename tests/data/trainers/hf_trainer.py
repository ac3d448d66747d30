"""Fine-tunes a causal language model with the Trainer of transformers, as a lab's script does.

It knows nothing of shakedown. Run it with torchrun, on CPU.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cache import read_cache
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


class Sums(Dataset):
    """Sums as text; `seconds` is what one row takes, as from a slow file system."""

    def __init__(self, tokenizer, seconds: float, cache: Path) -> None:
        texts = [f"{a:02}+{b:02}={a + b:03}" for a in range(40) for b in range(40)]
        self.rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        self.seconds = seconds
        self.cache = cache

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        read_cache(self.cache, int(os.environ["RANK"]))
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds-a-row", type=float, default=0.05)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(args.model),
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            save_steps=10,
            logging_steps=1,
            report_to="tensorboard",
            use_cpu=True,
            ddp_backend="gloo",
        ),
        train_dataset=Sums(
            AutoTokenizer.from_pretrained(args.model), args.seconds_a_row, args.cache
        ),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    # gloo's thread frees the last collective: in the middle of it torch's destructor would wait for
    # its lock with the GIL that it needs, for ever.
    time.sleep(1)
    dist.destroy_process_group()


main()
