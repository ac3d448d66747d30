"""A Lightning module under DDP on two CPU ranks, as a lab's script does. Run it with torchrun.

It knows nothing of shakedown.
"""

import argparse
import os
import time
from pathlib import Path

import lightning
import torch
from cache import read_cache
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    """Rows of a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        read_cache(self.folder, int(os.environ["RANK"]))
        time.sleep(0.03)
        return torch.full((4,), index / 400)


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=args.steps,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=CSVLogger(args.out, name="metrics", flush_logs_every_n_steps=1),
        callbacks=[ModelCheckpoint(args.out, filename="{step}", every_n_train_steps=10, save_top_k=-1)],
    )
    loader = DataLoader(Cached(args.cache), batch_size=4)
    trainer.fit(Lit(), loader, ckpt_path=args.resume or None)


main()
