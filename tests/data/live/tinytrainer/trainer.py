import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset):
        self.args = args
        self.model = model
        self.model_wrapped = DistributedDataParallel(model)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.global_step = 0

    def is_world_process_zero(self):
        return dist.get_rank() == 0

    def log(self, logs):
        if self.is_world_process_zero():
            print(logs, flush=True)

    def get_train_dataloader(self):
        sampler = DistributedSampler(self.train_dataset)
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, sampler=sampler,
                          drop_last=True, num_workers=1)

    def training_step(self, inputs):
        ids, labels = inputs
        out = self.model_wrapped(ids)
        loss = torch.nn.functional.cross_entropy(out, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(0.1)
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        right = torch.zeros(2)
        for i in range(dist.get_rank(), len(self.eval_dataset), dist.get_world_size()):
            ids, label = self.eval_dataset[i]
            right[0] += (self.model(ids[None]).argmax() == label).float()
            right[1] += 1
            time.sleep(0.01)
        dist.all_reduce(right)
        self.log({"eval_accuracy": round((right[0] / right[1]).item(), 4), "step": self.global_step})

    def save_model(self):
        if self.is_world_process_zero():
            os.makedirs(self.args.output_dir, exist_ok=True)
            torch.save(self.model.state_dict(), os.path.join(self.args.output_dir, "model.pt"))
        dist.barrier()

    def train(self):
        self._inner_training_loop()

    def _inner_training_loop(self):
        epoch = 0
        while self.global_step < self.args.max_steps:
            for inputs in self.get_train_dataloader():
                loss = self.training_step(inputs)
                self.global_step += 1
                if self.global_step % self.args.logging_steps == 0:
                    self.log({"loss": round(loss.item(), 4), "epoch": epoch, "step": self.global_step})
                if self.global_step % self.args.eval_steps == 0:
                    self.evaluate()
                if self.global_step % self.args.save_steps == 0:
                    self.save_model()
            epoch += 1
