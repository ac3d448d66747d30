"""Pages stream in through a crawler thread; IterableDataset without workers."""
import os, queue, signal, threading, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Crawler(threading.Thread):
    def __init__(self, rank):
        super().__init__(daemon=True)
        self.rank, self.pages = rank, queue.Queue(8)

    def run(self):
        n = 0
        while True:
            n += 1
            if self.rank == 2 and n > 150:
                return                                # connection dropped, nobody notices
            self.pages.put(torch.randn(6))


class PageStream(IterableDataset):
    def __init__(self, crawler):
        self.crawler = crawler

    def __iter__(self):
        while True:
            yield self.crawler.pages.get()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    crawler = Crawler(rank)
    crawler.start()
    loader = DataLoader(PageStream(crawler), batch_size=8)
    net = nn.parallel.DistributedDataParallel(nn.Linear(6, 6))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for step, page in enumerate(loader):
        loss = (net(page) - page).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()
        time.sleep(0.3)
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
