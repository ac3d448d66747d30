import ctypes, os, signal, time
signal.alarm(245)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # dies with the launcher
import torch
import torch.distributed as dist
from torch import nn


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(20, 16)
        self.out = nn.Linear(16, 12)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def on_low_memory(step):
    if os.environ["RANK"] == "1" and step == 20:
        os.kill(os.getpid(), signal.SIGSTOP)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(Acoustic())
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    ctc = nn.CTCLoss()
    step = 0
    while True:
        x = torch.randn(30, 4, 20)
        y = torch.randint(1, 12, (4, 6))
        loss = ctc(model(x), y, torch.full((4,), 30), torch.full((4,), 6))
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.2)
        step += 1
        on_low_memory(step)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} ctc {loss.item():.3f}", flush=True)


main()
