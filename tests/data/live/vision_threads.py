"""Healthy training beside helper threads that have nothing to do and wait for ever."""
import os, queue, signal, socket, threading, time
signal.alarm(285)
import torch
import torch.distributed as dist
import torch.nn as nn


class MetricsWriter(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True, name="metrics-writer")
        self.q = queue.Queue()

    def run(self):
        while True:
            self.q.get()


class StatusServer(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True, name="status-server")
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen()

    def run(self):
        while True:
            conn, _ = self.sock.accept()
            conn.close()


class StopFlag(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True, name="stop-flag")
        self.cond = threading.Condition()

    def run(self):
        with self.cond:
            self.cond.wait()


dist.init_process_group("gloo")
rank = dist.get_rank()
helpers = [MetricsWriter(), StatusServer(), StopFlag()]
for h in helpers:
    h.start()
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)))
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
it = 0
while True:
    img, tgt = torch.rand(8, 3, 8, 8), torch.randint(0, 5, (8,))
    loss = nn.functional.cross_entropy(net(img), tgt)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    time.sleep(0.15)
    it += 1
    if it % 40 == 0 and rank == 0:
        print("iter", it, "loss", round(loss.item(), 4), flush=True)
