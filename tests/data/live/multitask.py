import os, signal, time
signal.alarm(285)
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(20, 32)
        self.segment_head = nn.Linear(32, 4)
        self.depth_head = nn.Linear(32, 1)

    def forward(self, x, task):
        h = torch.relu(self.trunk(x))
        loss = self.segment_head(h[task == 0]).pow(2).sum()
        if (task == 1).any():
            loss = loss + self.depth_head(h[task == 1]).abs().sum()
        return loss / len(x)


def next_batch(rank, step):
    x = torch.randn(16, 20)
    task = torch.arange(16) % 2
    if rank == 1 and step >= 14:
        task = torch.zeros(16, dtype=torch.long)
    return x, task


def train_step(model, opt, x, task):
    loss = model(x, task)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(TwoHeads())
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(100000):
        x, task = next_batch(rank, step)
        print(f"[{rank}] step {step}: segment={int((task == 0).sum())} depth={int((task == 1).sum())}", flush=True)
        train_step(model, opt, x, task)
        time.sleep(0.2)
        dist.barrier()


if __name__ == "__main__":
    main()
