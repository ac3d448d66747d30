"""Rank 0 is an asynchronous parameter server; it sits in recv most of the time, as it should."""
import random, signal, time
signal.alarm(285)
import torch, torch.distributed as dist

DIM = 50


def serve():
    w, n = torch.zeros(DIM), 0
    while True:
        grad = torch.empty(DIM)
        who = dist.recv(grad)
        w -= 0.05 * grad
        dist.send(w, dst=who)
        n += 1
        if n % 30 == 0:
            print(f"server: {n} updates, |w| = {w.norm().item():.3f}, last from worker {who}", flush=True)


def work(rank):
    rng = random.Random(rank)
    w = torch.zeros(DIM)
    while True:
        time.sleep(rng.uniform(0.3, 2.5))
        x = torch.randn(20, DIM)
        grad = x.T @ (x @ (w - 1)) / 20
        dist.send(grad, dst=0)
        dist.recv(w, src=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        serve()
    else:
        work(dist.get_rank())
