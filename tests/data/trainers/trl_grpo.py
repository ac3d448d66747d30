"""GRPO with TRL's GRPOTrainer and a reward function, as a lab's script does. Run it with accelerate.

It knows nothing of shakedown.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cache import read_cache
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def reward_digits(completions, **kwargs) -> list[float]:
        read_cache(args.cache, dist.get_rank())
        time.sleep(0.2)  # 14 steps a second leave no time to do something to one of them
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

    rows = [{"prompt": f"{a:02}+{b:02}="} for a in range(20) for b in range(20)]
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward_digits,
        args=GRPOConfig(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            save_steps=5,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            ddp_backend="gloo",
            bf16=False,
        ),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    # gloo's thread frees the last collective: in the middle of it torch's destructor would wait for
    # its lock with the GIL that it needs, for ever.
    time.sleep(1)
    dist.destroy_process_group()


main()
