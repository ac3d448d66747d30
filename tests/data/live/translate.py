import logging, os, signal, time
signal.alarm(290)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s] %(message)s")
log = logging.getLogger("translate")


def train_epoch(model, opt, n):
    for _ in range(n):
        loss = model(torch.randn(16, 40)).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()
        time.sleep(0.05)


@torch.no_grad()
def beam_search(model, sentence):
    beam = torch.randn(5, 40)
    for _ in range(12):
        beam = torch.tanh(beam + 0.1 * model(beam))
        time.sleep(0.04)
    return beam.mean().item()


def evaluate(model, epoch, n=80):
    scores = []
    for i in range(n):
        scores.append(beam_search(model, i))
        if i % 10 == 0:
            log.info("epoch %d evaluate: sentence %d/%d", epoch, i, n)
    log.info("epoch %d bleu %.3f", epoch, sum(scores) / n)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(nn.Linear(40, 40))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(1000):
        train_epoch(model, opt, 20)
        if rank == 0:
            evaluate(model.module, epoch)
        dist.barrier()


if __name__ == "__main__":
    main()
