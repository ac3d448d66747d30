"""Fine-tuning with metrics of the main process."""
import argparse, os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn as nn


class Meter:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def update(self, v):
        self.total += v
        self.n += 1

    def synchronize(self):
        t = torch.tensor([self.total, float(self.n)])
        dist.all_reduce(t)
        return (t[0] / t[1]).item()


def log_metrics(meter, step):
    print(f"step {step} loss {meter.synchronize():.4f}", flush=True)


def train(args, model, opt, meter):
    rank = dist.get_rank()
    for step in range(1, args.steps + 1):
        x = torch.randn(8, 24)
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.update(loss.item())
        time.sleep(0.25)
        if rank == 0 and step % args.log_steps == 0:
            log_metrics(meter, step)
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=1000)
    ap.add_argument("--log-steps", type=int, default=10)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    model = nn.Linear(24, 3)
    train(args, model, torch.optim.SGD(model.parameters(), 0.1), Meter())


if __name__ == "__main__":
    main()
