"""Starts three training processes by itself (no torchrun) and waits for them one after the other."""
import argparse
import datetime
import os
import signal
import subprocess
import sys
import time

signal.alarm(288)


def launch(args):
    procs = []
    for rank in range(args.world_size):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.world_size),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), OMP_NUM_THREADS="1")
        procs.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker"], env=env))

    def stop(*_):
        for p in procs:
            if p.poll() is None:
                p.kill()
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    codes = []
    for p in procs:
        codes.append(p.wait())
    print("exit codes", codes)


def worker():
    signal.alarm(270)
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    print(f"rank {rank} of {world}, pid {os.getpid()}", flush=True)

    def rendezvous(name):
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/{r}" for r in range(world)], datetime.timedelta(hours=1))

    for trial in range(1000):
        lr = 10 ** -(1 + trial % 4)
        w = torch.zeros(5)
        for _ in range(10):
            x = torch.randn(16, 5)
            w -= lr * x.T @ (x @ w - 1) / 16
            time.sleep(0.1)
            if rank == 2 and trial == 4:
                os.kill(os.getpid(), signal.SIGKILL)
        rendezvous(f"trial{trial}")
        if rank == 0:
            print(f"trial {trial}: lr {lr:g} done", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--world-size", type=int, default=3)
    ap.add_argument("--port", type=int, default=29611)
    ap.add_argument("--worker", action="store_true")
    a = ap.parse_args()
    worker() if a.worker else launch(a)
