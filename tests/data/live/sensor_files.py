import os, signal, threading, time
_t = threading.Timer(280, os._exit, (9,)); _t.daemon = True; _t.start()
import torch, torch.distributed as dist

FILES = [f"sensor_{i:02d}.npz" for i in range(50)]


def my_files():
    return FILES[dist.get_rank()::dist.get_world_size()]      # 13, 13, 12, 12


def load(name):
    time.sleep(0.3)
    g = torch.Generator().manual_seed(len(name))
    return torch.randn(64, 6, generator=g)


def fit(w):
    for name in my_files():
        x = load(name)
        grad = x.T @ (x @ w - 1) / len(x)
        dist.all_reduce(grad)
        w -= 0.01 * grad / dist.get_world_size()
    return w


def evaluate(w):
    err = (load("heldout") @ w - 1).pow(2).mean()
    errs = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(errs, err)
    return sum(errs).item() / len(errs)


def main():
    dist.init_process_group("gloo")
    w = torch.zeros(6)
    while True:
        w = fit(w)
        e = evaluate(w)
        if dist.get_rank() == 0:
            print("heldout error", e, flush=True)


if __name__ == "__main__":
    main()
