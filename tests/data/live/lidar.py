"""Point clouds arrive through a feeder thread on every rank; two drives share one dead recorder."""
import collections, logging, signal, socket, threading, time
signal.alarm(285)
import torch, torch.distributed as dist
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


class SweepFeeder:
    def __init__(self, rank):
        self.rank, self.n = rank, 0
        self.cond, self.queue = threading.Condition(), collections.deque()
        self.recorder = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._feed, name="feeder", daemon=True).start()

    def read_sweep(self):
        self.n += 1
        if self.rank >= 2 and self.n > 30:
            with socket.create_connection(self.recorder.getsockname()) as s:
                s.recv(65536)
        return torch.randn(100, 3)

    def _feed(self):
        while True:
            sweep = self.read_sweep()
            with self.cond:
                while len(self.queue) >= 4:
                    self.cond.wait()
                self.queue.append(sweep)
                self.cond.notify_all()

    def next_batch(self):
        with self.cond:
            while not self.queue:
                self.cond.wait()
            sweep = self.queue.popleft()
            self.cond.notify_all()
        return sweep


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    feeder = SweepFeeder(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 4))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(100000):
        loss = model(feeder.next_batch()).max(0).values.pow(2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        if step % 10 == 0:
            logging.info("rank %d step %d", rank, step)


main()
