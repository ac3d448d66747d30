"""DDP on random digits. torchrun --standalone --nproc-per-node 2 mnist_mlp.py"""
import argparse
import os
import signal
import time

signal.alarm(285)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--log-every", type=int, default=50)
    return p.parse_args()


def train_step(model, opt, x, y):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss.item()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    t0 = time.time()
    step = 0
    while True:
        x = torch.rand(args.batch_size, 784)
        y = torch.randint(0, 10, (args.batch_size,))
        loss = train_step(model, opt, x, y)
        time.sleep(0.04)
        step += 1
        if step % args.log_every == 0 and rank == 0:
            print(f"step {step:6d}  loss {loss:.4f}  {step / (time.time() - t0):.1f} it/s", flush=True)


if __name__ == "__main__":
    main()
