import collections
import random
import signal
import string
import time

signal.alarm(290)
import torch
import torch.distributed as dist

CORPUS = 900_000


def make_doc(rng):
    return " ".join("".join(rng.choice(string.ascii_lowercase[:8]) for _ in range(3)) for _ in range(30))


def count_words(rank, docs):
    rng, counts, t = random.Random(rank), collections.Counter(), time.time()
    for i in range(docs):
        counts.update(make_doc(rng).split())
        if i % 20 == 0:
            time.sleep(0.02)
        if time.time() - t > 15:
            t = time.time()
            print(f"{time.strftime('%H:%M:%S')} rank {rank}: {i} of {docs} documents, {len(counts)} words", flush=True)
    return counts


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    counts = count_words(rank, CORPUS // dist.get_world_size())
    merged = [None] * dist.get_world_size()
    dist.all_gather_object(merged, counts)
    print("vocabulary", len(merged[0]), flush=True)


if __name__ == "__main__":
    main()
