"""Photos come from a slow share: a worker needs seconds for each, but they come."""
import hashlib
import os
import signal
import time

signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def decode(raw):
    h = hashlib.sha256()
    for i in range(0, len(raw), 4096):      # row by row
        h.update(raw[i:i + 4096])
        time.sleep(0.1)
    return h.digest()


class Photos(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        raw = os.urandom(4096 * 25)
        d = decode(raw)
        return torch.tensor(list(d), dtype=torch.float32) / 255, i % 4


def worker_init(_):
    signal.alarm(280)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ds = Photos()
    loader = DataLoader(ds, batch_size=8, num_workers=1, prefetch_factor=1, worker_init_fn=worker_init,
                        sampler=DistributedSampler(ds))
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 4))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    t = time.time()
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(time.strftime("%X"), f"rank {rank} batch {i} loss {loss.item():.3f} ({time.time() - t:.1f} s)", flush=True)
        t = time.time()


if __name__ == "__main__":
    main()
