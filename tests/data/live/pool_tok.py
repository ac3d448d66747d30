"""Tokenizes with a multiprocessing.Pool; on one rank a pool worker vanishes in the middle of a map."""
import multiprocessing as mp
import os
import signal
import time

signal.alarm(285)
import torch
import torch.distributed as dist


def init_worker():
    signal.alarm(280)


def encode(line):
    if line == "huge":
        os.kill(os.getpid(), signal.SIGKILL)       # what the memory limit does
    time.sleep(0.01)
    return [ord(c) % 32 for c in line]


def read_lines(rank, step):
    return ["some text"] * 7 + (["huge"] if rank == 1 and step == 15 else ["more text"])


def main():
    pool = mp.get_context("fork").Pool(2, initializer=init_worker)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    table = torch.randn(32, 4)
    for step in range(100000):
        ids = pool.map(encode, read_lines(rank, step), chunksize=2)
        g = torch.stack([table[i].mean(0) for i in ids]).mean(0)
        dist.all_reduce(g)
        time.sleep(0.2)
        if step % 5 == 0:
            print(f"rank {rank}: step {step}", flush=True)


if __name__ == "__main__":
    main()
