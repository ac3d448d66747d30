import logging, signal
signal.alarm(285)
import torch.distributed as dist
from reckit.loop import run

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    dist.init_process_group("gloo")
    run()
