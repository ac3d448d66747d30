"""A home-made launcher with a host list; one host of three is commented out."""
import argparse, os, signal, subprocess, sys

HOSTS = """
localhost   # rank 0
localhost   # rank 1
#localhost    rank 2, back after the repair
"""


def hosts():
    return [h.split()[0] for h in HOSTS.strip().splitlines() if not h.startswith("#")]


def launch(args):
    signal.alarm(292)
    procs = []
    for rank, host in enumerate(hosts()):
        print(f"launcher: rank {rank} on {host}, world size {args.world_size}", flush=True)
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(args.world_size), MASTER_ADDR="127.0.0.1",
                   MASTER_PORT=str(args.port), OMP_NUM_THREADS="1")
        procs.append(subprocess.Popen([sys.executable, "-u", os.path.abspath(__file__), "--train"], env=env))
    signal.signal(signal.SIGTERM, lambda *_: ([p.kill() for p in procs], sys.exit(1)))
    for p in procs:
        p.wait()


def train():
    signal.alarm(280)
    import datetime, time
    import torch
    import torch.distributed as dist
    print(f"rank {os.environ['RANK']}: init_process_group", flush=True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1))
    w = torch.zeros(3)
    while True:
        g = torch.randn(3)
        dist.all_reduce(g)
        w -= g
        time.sleep(0.2)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--world-size", type=int, default=3)
    ap.add_argument("--port", type=int, default=29733)
    ap.add_argument("--train", action="store_true")
    a = ap.parse_args()
    train() if a.train else launch(a)
