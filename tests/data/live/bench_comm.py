"""Bandwidth benchmark with a time budget per rank."""
import signal, time
signal.alarm(285)
import torch
import torch.distributed as dist


class Bench:
    def __init__(self, budget):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.group = dist.group.WORLD
        self.budget = budget

    def one_size(self, n):
        t = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(torch.ones(n), group=self.group)
            time.sleep(0.1)
        return n * 4 * 5 / (time.perf_counter() - t) / 1e6

    def run(self):
        deadline = time.time() + self.budget
        n = 1024
        while time.time() < deadline:
            bw = self.one_size(n)
            print(f"[rank {self.rank}] n={n} {bw:.1f} MB/s", flush=True)
            n = n * 2 if n < 2 ** 16 else 1024
        print(f"[rank {self.rank}] budget used up, leaving", flush=True)

    def close(self):
        dist.destroy_process_group()


def linger(seconds=400):
    """keep the container up until somebody has fetched the results"""
    time.sleep(seconds)


def main():
    b = Bench(10.0)
    if b.rank == 2:
        b.budget = 4.0
    b.run()
    b.close()
    print(f"[rank {b.rank}] results are ready", flush=True)
    linger()


main()
