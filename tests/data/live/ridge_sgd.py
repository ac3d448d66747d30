# ridge regression with hand-made gradient averaging, silent
import signal, time
signal.alarm(280)
import torch, torch.distributed as dist

dist.init_process_group(backend="gloo")
R, W = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(17 + R)
true_w = torch.arange(16.0)
w = torch.zeros(16)


def next_batch(n=64):
    x = torch.randn(n, 16, generator=g)
    return x, x @ true_w + 0.1 * torch.randn(n, generator=g)


def average(t):
    dist.all_reduce(t)
    t /= W
    return t


t_end = time.time() + 300
while time.time() < t_end:
    x, y = next_batch()
    grad = 2 * x.T @ (x @ w - y) / len(y) + 1e-3 * w
    time.sleep(0.12)
    w -= 0.01 * average(grad)
dist.destroy_process_group()
