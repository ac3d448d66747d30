"""Frames go through an external filter process; clip lengths differ."""
import os, signal, subprocess, threading, time
signal.alarm(285)
import torch, torch.distributed as dist
from torch import nn


class FrameFilter:
    """one long-lived filter; a clip is written whole, then read whole"""

    def __init__(self):
        self.proc = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def run(self, clip: bytes) -> bytes:
        view, left = memoryview(clip), len(clip)
        while view:
            view = view[self.proc.stdin.write(view):]
        out = b""
        while len(out) < left:
            out += self.proc.stdout.read(left - len(out))
        return out


def load_clip(rank, step):
    frames = 400 if rank == 1 and step >= 16 else 8
    return os.urandom(frames * 1024)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    filt = FrameFilter()
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 8))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(100000):
        raw = filt.run(load_clip(rank, step))
        x = torch.frombuffer(bytearray(raw[:64 * 64]), dtype=torch.uint8).float().view(64, 64) / 255
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        if step % 5 == 0:
            print(f"[rank{rank}] step {step} loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
