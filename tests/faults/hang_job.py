"""A small FSDP2 job on gloo that hangs on purpose: `hang_job.py FAULT ATTEMPT`.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by the test that starts it; TRAINER_DEVICE as
in tests/data/trainers/ddp.py.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from shakedown.monitor import hook
from shakedown.monitor.heartbeat import Heartbeat

FAULT, ATTEMPT = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])
DEVICE = os.environ.get("TRAINER_DEVICE", "cpu")
CULPRIT, STEP = 1, 4


def log_extra(loss: torch.Tensor) -> None:
    dist.broadcast(loss.detach().clone(), src=0)  # called by one rank alone


def same_call(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def inject(step: int, loss: torch.Tensor) -> None:
    if RANK != CULPRIT or step != STEP:
        return
    if FAULT == "conditional":
        log_extra(loss)
    elif FAULT == "mismatch":
        dist.all_reduce(loss.detach().clone())  # gloo aborts: it meets another all_reduce
    elif FAULT == "asleep":
        time.sleep(3600)
    elif FAULT == "raises":
        raise ValueError("loss is not finite")


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, device=DEVICE) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(beats: Heartbeat) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 1000):
        beats.beat(phase="train", step=step, micro_batch=0, batch_size=4)
        loss = model(torch.randn(4, 16, device=DEVICE)).square().mean()
        loss.backward()
        inject(step, loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2 if FAULT == "extra_call" and (RANK, step) == (CULPRIT, STEP) else 1):
            same_call(loss.detach().clone())
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    hook.install(RANK, ATTEMPT / "evidence")
    beats = Heartbeat(ATTEMPT / "heartbeat", RANK)
    beats.beat(phase="init")
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    train(beats)


if __name__ == "__main__":
    main()
