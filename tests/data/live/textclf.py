import signal

signal.alarm(285)

import torch
import torch.distributed as dist
from tinytrainer import Trainer, TrainingArguments


class Reviews(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 500, (n, 24), generator=g)
        self.labels = (self.ids.sum(1) % 2).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.EmbeddingBag(500, 16)
        self.out = torch.nn.Linear(16, 2)

    def forward(self, ids):
        return self.out(self.emb(ids))


def main():
    dist.init_process_group("gloo")
    Trainer(Bag(), TrainingArguments(), Reviews(4000, 0), Reviews(200, 1)).train()


if __name__ == "__main__":
    main()
