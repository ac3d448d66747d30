import os, pdb, signal, time
signal.alarm(285)
os.dup2(os.pipe()[0], 0)
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def dice(p, t):
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def training_step(model, batch, step):
    x, t = batch
    p = torch.sigmoid(model(x))
    loss = dice(p, t)
    if step == 18 and dist.get_rank() == 1:
        loss = loss * float("inf")
    if not torch.isfinite(loss):
        pdb.set_trace()
    return loss


def fit(model, steps=10000):
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        batch = torch.rand(2, 1, 16, 16), (torch.rand(2, 1, 16, 16) > 0.5).float()
        loss = training_step(model, batch, step)
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        if step % 6 == 0 and dist.get_rank() == 0:
            print("step", step, "dice loss", round(loss.item(), 4), flush=True)


dist.init_process_group("gloo")
fit(DDP(nn.Conv2d(1, 1, 3, padding=1)))
