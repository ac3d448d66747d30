"""GRPO-like loop: group samples, a judge scores them, advantages over all ranks."""
import json, signal, socket, time
signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn


class Judge:
    """talks to a judge over a plain socket; rank 1's judge accepts and never answers after a while"""

    def __init__(self, rank):
        self.rank, self.calls = rank, 0
        self.backlog = socket.create_server(("127.0.0.1", 0))

    def score(self, text):
        self.calls += 1
        if self.rank != 1 or self.calls <= 24:
            return float(text.count("7"))
        with socket.create_connection(self.backlog.getsockname()) as s:
            s.sendall(json.dumps({"text": text}).encode() + b"\n")
            return json.loads(s.recv(4096))["score"]


def reward_fn(judge, samples):
    return torch.tensor([judge.score(s) for s in samples])


def generate(policy, n=4, length=20):
    out = []
    for _ in range(n):
        p = torch.softmax(policy(torch.ones(1)), -1)
        out.append("".join(str(int(torch.multinomial(p, 1))) for _ in range(length)))
        time.sleep(0.1)
    return out


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy, judge = nn.Linear(1, 10), Judge(rank)
    for it in range(100000):
        samples = generate(policy)
        rewards = reward_fn(judge, samples)
        everyone = [torch.zeros_like(rewards) for _ in range(world)]
        dist.all_gather(everyone, rewards)
        mean = torch.cat(everyone).mean()
        loss = -(rewards - mean).mean() * torch.log_softmax(policy(torch.ones(1)), -1)[7]
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
            p.data -= 0.1 * p.grad / world
            p.grad = None
        print(f"[rank {rank}] iteration {it} mean reward {mean.item():.2f}", flush=True)


if __name__ == "__main__":
    main()
