"""Checkpoints are written by a background thread which meets the other ranks' threads at a barrier."""
import os, signal, tempfile, threading, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn


class AsyncCheckpointer:
    def __init__(self):
        self.thread = None

    def save(self, state, step):
        self.wait()
        self.thread = threading.Thread(target=self._write, args=(state, step), name="checkpointer", daemon=True)
        self.thread.start()

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _write(self, state, step):
        rank = dist.get_rank()
        path = os.path.join(tempfile.gettempdir(), f"live_async_ckpt_{rank}.pt")
        torch.save(state, path)
        time.sleep(2.0 * rank)               # the shards differ in size
        dist.barrier()
        if rank == 0:
            print(f"checkpoint of step {step} is complete", flush=True)


def train_step(net, step):
    loss = net(torch.randn(4, 10)).pow(2).mean()
    net.zero_grad()
    loss.backward()
    time.sleep(0.5)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.data -= 0.05 * p.grad
    return loss.item()


def main():
    dist.init_process_group("gloo")
    net, ckpt = nn.Linear(10, 2), AsyncCheckpointer()
    for step in range(1, 100000):
        loss = train_step(net, step)
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
        if step % 12 == 0:
            ckpt.save(net.state_dict(), step)
    ckpt.wait()


if __name__ == "__main__":
    main()
