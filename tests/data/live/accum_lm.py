import argparse, contextlib, os, signal, sys, time
signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.elastic.multiprocessing.errors import record


def micro_batch(bs, seq):
    return torch.randint(0, 64, (bs, seq + 1))


@record
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--accum", type=int, default=24)
    ap.add_argument("--seq", type=int, default=32)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    lm = DDP(torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)))
    opt = torch.optim.AdamW(lm.parameters())
    step = 0
    while True:
        step += 1
        t = time.perf_counter()
        for k in range(a.accum):
            ids = micro_batch(2, a.seq)
            ctx = lm.no_sync() if k < a.accum - 1 else contextlib.nullcontext()
            with ctx:
                loss = F.cross_entropy(lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / a.accum
                loss.backward()
            for _ in range(5):
                torch.rand(64, 64) @ torch.rand(64, 64)
                time.sleep(0.09 + 0.02 * rank)
        opt.step()
        opt.zero_grad()
        print(f"rank={rank} step={step} dt={time.perf_counter() - t:.2f}s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
