import os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        time.sleep(0.03)
        return x + self.ff(self.norm(x))


class LM(nn.Module):
    def __init__(self, v=128, d=32, n=3):
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.head = nn.Linear(d, v)

    def forward(self, t):
        x = self.emb(t)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LM()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while True:
        ids = torch.randint(0, 128, (4, 17))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if dist.get_rank() == 0 and step % 25 == 0:
            print(f"[{time.strftime('%H:%M:%S')}] step={step} loss={loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
