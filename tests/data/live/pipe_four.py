"""Forward pipeline over four stages; stage 1 filters."""
import os, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn

N_MICRO, D = 6, 16


class Stage:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.layer = nn.Linear(D, D)

    def recv_forward(self):
        x = torch.empty(2, D)
        dist.recv(x, src=self.rank - 1)
        return x

    def send_forward(self, x):
        dist.send(x, dst=self.rank + 1)

    def forward_step(self, step, k):
        x = torch.randn(2, D) if self.rank == 0 else self.recv_forward()
        with torch.no_grad():
            y = torch.tanh(self.layer(x))
        time.sleep(0.05)
        if self.rank == 1 and step >= 8 and k == N_MICRO - 1:
            return                                   # nothing left after the filter
        if self.rank < self.world - 1:
            self.send_forward(y)


def run_schedule(stage, step):
    for k in range(N_MICRO):
        stage.forward_step(step, k)


def main():
    dist.init_process_group("gloo")
    stage = Stage()
    step = 0
    while True:
        run_schedule(stage, step)
        dist.barrier()
        if stage.rank == 3:
            print(f"schedule {step} complete", flush=True)
        step += 1


if __name__ == "__main__":
    main()
