import logging
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .features import FeatureCache
from .model import Ranker

logger = logging.getLogger(__name__)


def next_batch(cache):
    items = torch.randint(0, 100, (32,))
    return cache.lookup(items), torch.rand(32, 1)


def run():
    rank = dist.get_rank()
    cache = FeatureCache(rank)
    model = DistributedDataParallel(Ranker())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    step = 0
    while True:
        x, y = next_batch(cache)
        loss = (model(x) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.1)
        step += 1
        if step % 20 == 0:
            logger.info("rank %d step %d loss %.4f", rank, step, loss.item())
