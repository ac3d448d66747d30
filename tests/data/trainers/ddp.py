"""A plain DDP script of a lab: it knows nothing of shakedown. Run it with torchrun, on CPU; with
TRAINER_DEVICE=cuda all ranks share a GPU (NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

import argparse
import atexit
import ctypes
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cache import read_cache
from torch.nn.parallel import DistributedDataParallel


def work(seconds: float, *, compute: bool) -> None:
    """The forward pass of a larger model, as far as time goes."""
    end = time.monotonic() + seconds
    while compute and time.monotonic() < end:
        torch.ones(128, 128).matmul(torch.ones(128, 128))
    time.sleep(max(end - time.monotonic(), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save-on", help="a signal on which every rank saves and stops")
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--compute", action="store_true", help="instead of sleeping in a step")
    parser.add_argument("--leave-on", type=Path, help="once it is there rank 1 has no more data")
    parser.add_argument("--cache", type=Path, help="each rank reads its part of it in each step")
    parser.add_argument("--end-by", choices=("abort", "wait"), help="in rank 1's own exit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = os.environ.get("TRAINER_DEVICE", "cpu")
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1, device=device))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    told: list[int] = []
    if args.save_on:
        signal.signal(signal.Signals[args.save_on], lambda number, _frame: told.append(number))
    first = 1
    if args.resume:
        saved = torch.load(args.resume)
        model.module.load_state_dict(saved["model"])
        first = saved["step"] + 1
        print(f"rank {rank} resumed at {first}", flush=True)
    for step in range(first, args.steps + 1):
        work(args.step_seconds, compute=args.compute)
        if args.cache:
            read_cache(args.cache, rank)
        if args.leave_on and args.leave_on.exists() and rank == 1:
            os._exit(0)  # as a script that does not destroy its process group
        loss = model(torch.ones(2, 4, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stopping = torch.tensor(len(told), device=device)
        dist.all_reduce(stopping)
        everybody = bool(stopping == dist.get_world_size())
        if rank == 0:
            print(f"step {step} loss={loss.item():.4f}", flush=True)
        if rank == 0 and (everybody or step % 5 == 0):
            args.out.mkdir(exist_ok=True, parents=True)
            torch.save({"model": model.module.state_dict(), "step": step}, args.out / "part.pt")
            (args.out / "part.pt").rename(args.out / f"step_{step}.pt")
        if everybody:
            print(f"rank {rank} was told to stop", flush=True)
            break
    dist.destroy_process_group()
    # As torch's own race of a destructor with a thread of gloo: in native code, with the GIL.
    ends = {"abort": os.abort, "wait": ctypes.PyDLL(None).pause}
    if args.end_by and rank == 1:
        atexit.register(ends[args.end_by])


main()
