import argparse, os, signal, threading, time
signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

_index_lock = threading.Lock()


def rebuild_index():
    with _index_lock:
        time.sleep(3)


class Folder(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        with _index_lock:
            offset = i * 17 % 1000
        time.sleep(0.01)
        return torch.full((3, 8, 8), offset / 1000.0), offset % 10


def worker_init_fn(worker_id):
    signal.alarm(280)


def train(loader, model, criterion, optimizer, epoch, rank):
    for i, (images, target) in enumerate(loader):
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] rank {rank} Loss {loss.item():.4e}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-j", "--workers", default=2, type=int)
    parser.add_argument("--epochs", default=90, type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ds = Folder(640)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, num_workers=args.workers, worker_init_fn=worker_init_fn)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch == 2 and rank == 1:
            threading.Thread(target=rebuild_index).start()
            time.sleep(0.5)
        train(loader, model, nn.CrossEntropyLoss(), opt, epoch, rank)


if __name__ == "__main__":
    main()
