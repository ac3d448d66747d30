"""mp.spawn without torchrun: a scheduler in the parent hands out one task a rank and round."""
import argparse, os, signal, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def solve(task):
    x = torch.randn(8, generator=torch.Generator().manual_seed(task))
    time.sleep(0.4)
    return x


def worker(rank, world, port, queues):
    signal.alarm(280)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    print(f"[rank {rank}] pid {os.getpid()} ready", flush=True)
    n = 0
    while True:
        task = queues[rank].get()
        result = solve(task)
        dist.all_reduce(result)
        n += 1
        print(f"[rank {rank}] round {n} task {task}", flush=True)


def schedule(queues, world, rounds=1000):
    task = 0
    for rnd in range(rounds):
        for rank in range(world):
            task += 1
            if rnd >= 8 and rank == 1:
                continue                       # no task fits
            queues[rank].put(task)
        time.sleep(0.5)


def main():
    signal.alarm(290)
    ap = argparse.ArgumentParser()
    ap.add_argument("--world", type=int, default=2)
    ap.add_argument("--port", type=int, default=29877)
    a = ap.parse_args()
    ctx = mp.get_context("spawn")
    queues = [ctx.Queue() for _ in range(a.world)]
    procs = mp.spawn(worker, (a.world, a.port, queues), nprocs=a.world, join=False, daemon=True)
    signal.signal(signal.SIGTERM, lambda *_: ([p.kill() for p in procs.processes], os._exit(1)))
    schedule(queues, a.world)
    procs.join()


if __name__ == "__main__":
    main()
