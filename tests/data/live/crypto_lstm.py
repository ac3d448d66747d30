import argparse, signal, sys, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn


class QuoteFeed:
    def __init__(self, rank):
        self.rank, self.calls = rank, 0

    def _request(self):
        self.calls += 1
        if self.rank == 2 and self.calls > 20:
            raise ConnectionError("503")
        return torch.randn(12, 5, 4)

    def wait_before_retry(self, seconds):
        time.sleep(seconds)

    def fetch(self):
        delay = 3600
        while True:
            try:
                return self._request()
            except ConnectionError:
                self.wait_before_retry(delay)
                delay *= 2


def main():
    argparse.ArgumentParser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    feed = QuoteFeed(rank)
    lstm = nn.parallel.DistributedDataParallel(nn.LSTM(4, 8))
    opt = torch.optim.Adam(lstm.parameters())
    step = 0
    while True:
        q = feed.fetch()
        out, _ = lstm(q)
        loss = out.pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()
        time.sleep(0.2)
        step += 1
        if step % 5 == 0:
            print(f"{time.strftime('%X')} rank={rank} step={step} loss={loss.item():.4f}")
            sys.stdout.flush()


main()
