"""Stencil on a ring of four ranks; in the new exchange everyone receives first."""
import signal, time
signal.alarm(285)
import torch, torch.distributed as dist


def exchange_old(field, left, right):
    halo = torch.empty(4)
    if dist.get_rank() % 2 == 0:
        dist.send(field[-4:].clone(), right)
        dist.recv(halo, left)
    else:
        dist.recv(halo, left)
        dist.send(field[-4:].clone(), right)
    return halo


def exchange(field, left, right):
    halo = torch.empty(4)
    dist.recv(halo, left)
    dist.send(field[-4:].clone(), right)
    return halo


def main():
    dist.init_process_group("gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    field = torch.randn(64)
    for t in range(100000):
        fn = exchange_old if t < 20 else exchange
        halo = fn(field, (r - 1) % w, (r + 1) % w)
        field = 0.5 * field + 0.5 * torch.cat([halo, field[:-4]])
        time.sleep(0.2)
        if t % 5 == 0:
            print(f"rank {r} t={t}", flush=True)


if __name__ == "__main__":
    main()
