import os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh


def build():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    fully_shard(m[0], mesh=mesh)
    fully_shard(m[2], mesh=mesh)
    return fully_shard(m, mesh=mesh)


def next_batch(rank, step):
    x = torch.randn(8, 16)
    length = torch.randint(1, 9, (8,))
    if rank == 1 and step == 20:
        length[:] = 0
    return x[length > 0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(100000):
        x = next_batch(rank, step)
        if x.numel() == 0:
            print(f"[rank {rank}] step {step}: empty batch, skipped", flush=True)
        else:
            loss = (model(x) - x).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        time.sleep(0.2)
        if step % 5 == 0 and rank == 0:
            print(f"[rank {rank}] step {step}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
