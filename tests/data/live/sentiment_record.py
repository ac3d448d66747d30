import logging, os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rank" + os.environ.get("RANK", "?") + " %(message)s")
logger = logging.getLogger(__name__)
VOCAB = {w: i for i, w in enumerate("the a film was good bad very not".split())}


def tokenize(text):
    return torch.tensor([VOCAB[w] for w in text.split()])


def read_reviews(rank):
    n = 0
    while True:
        n += 1
        yield ("the film was meh" if rank == 1 and n == 25 else "the film was very good"), 1.0


def train(rank):
    model = DDP(torch.nn.EmbeddingBag(len(VOCAB), 1))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step, (text, label) in enumerate(read_reviews(rank)):
        ids = tokenize(text)
        loss = (model(ids[None]).sum() - label) ** 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        if step % 10 == 0:
            logger.info("step %d loss %.4f", step, loss.item())


@record
def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        train(rank)
    except Exception:
        logger.exception("training failed")
        raise
    finally:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
