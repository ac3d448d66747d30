import os, signal, time, logging
signal.alarm(290)
import numpy as np
import torch
import torch.distributed as dist

logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)


def covariance(shard, seconds):
    """numpy, one shard; the last shard is far bigger than the others"""
    acc = np.zeros((96, 96))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        block = np.random.rand(200, 96)
        acc += block.T @ block
        _, vals, _ = np.linalg.svd(acc + np.eye(96))
        time.sleep(0.03)
    return acc / np.trace(acc)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seconds = 33.0 if rank == world - 1 else 8.0
    total = None
    for rnd in range(500):
        acc = torch.from_numpy(covariance(rank, seconds))
        parts = [torch.empty_like(acc) for _ in range(world)]
        dist.all_gather(parts, acc)
        total = sum(parts)
        if rank == 0:
            logging.info("round %d done, top eigenvalue %.4f", rnd, torch.linalg.eigvalsh(total)[-1].item())


if __name__ == "__main__":
    main()
