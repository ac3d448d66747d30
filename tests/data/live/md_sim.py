"""Molecular-dynamics-like surrogate: one optimizer step integrates a long trajectory."""
import datetime
import signal
import time

signal.alarm(290)
import torch
import torch.distributed as dist


def integrate(pos, vel, w, n):
    for _ in range(n):
        force = torch.tanh(pos @ w) - 0.1 * pos
        vel = vel + 0.01 * force
        pos = pos + 0.01 * vel
        time.sleep(0.02)          # stands for the rest of the kernel
    return pos, vel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    pos, vel, w = torch.randn(64, 32), torch.zeros(64, 32), torch.randn(32, 32) * 0.1
    for step in range(1, 1000):
        t = time.time()
        pos, vel = integrate(pos, vel, w, 1150 if rank == 0 else 1250)
        energy = vel.pow(2).sum()
        dist.all_reduce(energy)
        now = datetime.datetime.now().strftime("%H:%M:%S")
        print(f"{now} rank{rank} step {step} energy {energy.item():.3f} took {time.time() - t:.1f}s", flush=True)


main()
