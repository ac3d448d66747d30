import os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn


def reduce_grads(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def d_step(gen, disc, opt, real):
    fake = gen(torch.randn(16, 8)).detach()
    loss = nn.functional.softplus(-disc(real)).mean() + nn.functional.softplus(disc(fake)).mean()
    opt.zero_grad()
    loss.backward()
    reduce_grads(disc)
    opt.step()
    return loss.item()


def g_step(gen, disc, opt):
    loss = nn.functional.softplus(-disc(gen(torch.randn(16, 8)))).mean()
    opt.zero_grad()
    loss.backward()
    reduce_grads(gen)
    opt.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    gen, disc = nn.Linear(8, 20), nn.Linear(20, 1)
    og, od = torch.optim.Adam(gen.parameters()), torch.optim.Adam(disc.parameters())
    for it in range(100000):
        real = torch.randn(16, 20)
        ld = d_step(gen, disc, od, real)
        lg = g_step(gen, disc, og)
        time.sleep(0.2)
        if rank == 1 and it == 12:
            lg = float("nan")
        if lg != lg:
            print(f"rank {rank} it {it}: generator loss is nan, skipping the rest of this iteration", flush=True)
            continue
        dist.barrier()
        if it % 4 == 0:
            print(f"rank {rank} it {it}: d {ld:.3f} g {lg:.3f}", flush=True)


if __name__ == "__main__":
    main()
