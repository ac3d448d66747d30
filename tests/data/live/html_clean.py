import argparse, re, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist

WORDS_ONLY = re.compile(r"^(\w+\s?)*$")


def clean(page):
    return page if WORDS_ONLY.match(page) else ""


def pages(rank):
    n = 0
    while True:
        n += 1
        if rank == 1 and n == 60:
            yield "lorem ipsum dolor sit amet consetetur sadipscing elitr sed diam nonumy eirmod <"
        else:
            yield "lorem ipsum dolor sit amet"


def collate(source, size=4):
    return [len(clean(next(source))) for _ in range(size)]


def main():
    argparse.ArgumentParser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    source, step = pages(rank), 0
    while True:
        lengths = torch.tensor(collate(source), dtype=torch.float32)
        dist.all_reduce(lengths)
        time.sleep(0.3)
        step += 1
        if step % 4 == 0:
            print(time.strftime("%H:%M:%S"), f"rank {rank}", f"step {step}", flush=True)


if __name__ == "__main__":
    main()
