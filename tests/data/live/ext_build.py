"""Builds a (pretended) extension under a lock file; an earlier run has left the lock behind."""
import os, signal, tempfile, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

BUILD_DIR = os.path.join(tempfile.gettempdir(), "live_torch_extensions", "fused_ops")


def load_ops():
    os.makedirs(BUILD_DIR, exist_ok=True)
    lock = os.path.join(BUILD_DIR, "lock")
    open(lock, "a").close()
    baton = FileBaton(lock)
    if baton.try_acquire():
        try:
            time.sleep(1)
        finally:
            baton.release()
    else:
        baton.wait()
    return torch.nn.functional.gelu


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        print("Building extension module fused_ops...", flush=True)
        op = load_ops()
    dist.barrier()
    if rank != 0:
        op = load_ops()
    while True:
        y = op(torch.randn(8))
        dist.all_reduce(y)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
