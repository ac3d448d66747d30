"""Supervised fine-tuning with TRL's SFTTrainer, as a lab's script does. Run it with accelerate.

It knows nothing of shakedown.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cache import read_cache
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class SlowMetrics(TrainerCallback):
    """Sends each step's numbers to a service that takes its time, with rows of a cache."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def on_step_end(self, args, state, control, **kwargs) -> None:
        time.sleep(0.2)
        read_cache(self.cache, dist.get_rank())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        {"prompt": f"{a:02}+{b:02}=", "completion": f"{a + b:03}"}
        for a in range(20)
        for b in range(20)
    ]
    trainer = SFTTrainer(
        model=args.model,
        args=SFTConfig(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            save_steps=10,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            ddp_backend="gloo",
            bf16=False,
        ),
        train_dataset=Dataset.from_list(rows),
        callbacks=[SlowMetrics(args.cache)],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    # gloo's thread frees the last collective: in the middle of it torch's destructor would wait for
    # its lock with the GIL that it needs, for ever.
    time.sleep(1)
    dist.destroy_process_group()


main()
