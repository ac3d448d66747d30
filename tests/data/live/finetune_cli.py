"""A command-line fine-tuner that asks before it overwrites."""
import argparse, os, signal, time
signal.alarm(285)
_r, _w = os.pipe()          # a console that stays open, also where the launcher has none
os.dup2(_r, 0)
import torch
import torch.distributed as dist


def confirm(question):
    return input(question + " [y/N] ").strip().lower() == "y"


def save(model, path, rank):
    answer = [None]
    if rank == 0:
        answer[0] = confirm(f"{path} exists. Overwrite?")
    dist.broadcast_object_list(answer, src=0)
    if rank == 0 and answer[0]:
        torch.save(model, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--output", default="./checkpoint-last.pt")
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    w = torch.zeros(10)
    for epoch in range(args.epochs):
        for _ in range(20):
            g = torch.randn(10)
            dist.all_reduce(g)
            w -= 0.01 * g
            time.sleep(0.1)
        if rank == 0:
            print(f"epoch {epoch} done", flush=True)
    save(w, args.output, rank)


if __name__ == "__main__":
    main()
