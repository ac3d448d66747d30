"""Two pipeline stages with blocking send/recv."""
import os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn

MICRO = 4
HID = 64


def forward_backward_first(stage, opt, it):
    outs = []
    for _ in range(MICRO):
        x = torch.randn(8, 32)
        h = stage(x)
        time.sleep(0.08)
        dist.send(h.detach(), dst=1)
        outs.append(h)
    opt.zero_grad()
    for h in outs:
        g = torch.empty(8, HID)
        dist.recv(g, src=1)
        h.backward(g)
    opt.step()


def forward_backward_last(stage, opt, it):
    opt.zero_grad()
    hs, losses = [], []
    for _ in range(MICRO):
        h = torch.empty(8, HID)
        dist.recv(h, src=0)
        h.requires_grad_(True)
        loss = stage(h).pow(2).mean() / MICRO
        loss.backward()
        time.sleep(0.05)
        hs.append(h.grad)
        losses.append(loss.item())
    for g in hs:
        dist.send(g, dst=0)
    opt.step()
    if it % 20 == 0:
        print(f"[stage 1] iter {it} loss {sum(losses):.5f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    stage = nn.Linear(32, HID) if rank == 0 else nn.Linear(HID, 1)
    opt = torch.optim.Adam(stage.parameters(), 1e-3)
    fn = forward_backward_first if rank == 0 else forward_backward_last
    it = 0
    while it < 100000:
        fn(stage, opt, it)
        it += 1


main()
