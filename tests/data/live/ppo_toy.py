"""A small PPO-like loop: rollouts, rewards, one update."""
import random
import signal
import time

signal.alarm(285)
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB = 32


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 24)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, tok):
        return self.head(self.emb(tok))


@torch.no_grad()
def get_rollout(policy, length):
    toks = [torch.zeros(4, dtype=torch.long)]
    for _ in range(length):
        logits = policy.module(toks[-1])
        toks.append(torch.distributions.Categorical(logits=logits).sample())
        time.sleep(0.06)
    return torch.stack(toks, 1)


def reward_fn(seq):
    time.sleep(0.5)
    return (seq == 7).float().sum(1)


def update(policy, opt, seq, adv):
    logp = torch.log_softmax(policy(seq[:, :-1]), -1).gather(-1, seq[:, 1:, None]).squeeze(-1)
    loss = -(logp.sum(1) * adv).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    policy = DDP(Policy())
    opt = torch.optim.Adam(policy.parameters(), 1e-2)
    for it in range(10000):
        t = time.time()
        seq = get_rollout(policy, random.randint(120, 220))
        r = reward_fn(seq)
        stat = torch.stack([r.sum(), torch.tensor(float(len(r)))])
        dist.all_reduce(stat)
        mean = stat[0] / stat[1]
        for _ in range(3):
            update(policy, opt, seq, r - mean)
        if rank == 0:
            print(f"iteration {it}: reward {mean.item():.3f}, {time.time() - t:.1f} s", flush=True)


if __name__ == "__main__":
    main()
