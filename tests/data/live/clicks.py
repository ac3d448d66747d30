"""Click model; each rank reads its own part of the day's log."""
import os
import signal
import time

signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def load_part(rank):
    n = 16 * (40 if rank == 0 else 31)
    g = torch.Generator().manual_seed(rank)
    return TensorDataset(torch.randn(n, 10, generator=g), torch.randint(0, 2, (n, 1), generator=g).float())


def train_one_epoch(model, opt, loader, rank, epoch):
    for i, (x, y) in enumerate(loader, 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.15)
        if i % 10 == 0:
            print(f"[rank {rank}] epoch {epoch} batch {i}/{len(loader)} loss {loss.item():.4f}", flush=True)
    print(f"[rank {rank}] epoch {epoch} finished after {i} batches", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    loader = DataLoader(load_part(rank), batch_size=16, shuffle=True)
    model = DDP(nn.Linear(10, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(50):
        train_one_epoch(model, opt, loader, rank, epoch)
        dist.barrier()


if __name__ == "__main__":
    main()
