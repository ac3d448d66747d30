"""Row-parallel layer with a pool of communicators picked by the layer's key."""
import signal, time, zlib
signal.alarm(285)
import torch
import torch.distributed as dist


class CommPool:
    def __init__(self, n):
        self.groups = [dist.new_group([0, 1]) for _ in range(n)]

    def reduce(self, x, key):
        dist.all_reduce(x, group=self.groups[zlib.crc32(key.encode()) % len(self.groups)])
        return x


class RowParallel:
    def __init__(self, pool, name):
        self.pool, self.name, self.w = pool, name, torch.randn(8, 8)

    def __call__(self, x, step):
        time.sleep(0.1)
        key = self.name if step < 30 else f"{self.name}/{dist.get_rank()}"
        return self.pool.reduce(x @ self.w, key).tanh()


def main():
    dist.init_process_group("gloo")
    pool = CommPool(4)
    layers = [RowParallel(pool, f"layer{i}") for i in range(2)]
    for step in range(100000):
        x = torch.ones(4, 8)
        for layer in layers:
            x = layer(x, step)
        if step % 10 == 0 and dist.get_rank() == 0:
            print("step", step, round(x.mean().item(), 4), flush=True)


if __name__ == "__main__":
    main()
