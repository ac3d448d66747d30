"""Rank 0 trains, rank 1 makes rollouts; weights go over by broadcast, versions through the store."""
import signal, sys, time
signal.alarm(285)
import torch
import torch.distributed as dist

SYNC_EVERY = 3


class RolloutWorker:
    def __init__(self, store):
        self.store, self.version = store, 0
        self.w = torch.zeros(20)

    def generate(self):
        time.sleep(0.3)
        return torch.tanh(self.w + torch.randn(20))

    def wait_for_version(self, wanted):
        while int(self.store.get("version")) < wanted:
            time.sleep(0.2)

    def run(self):
        for it in range(1, 10 ** 6):
            dist.send(self.generate(), dst=0)
            if it % SYNC_EVERY == 0:
                if it >= 12:
                    self.wait_for_version(self.version + 1)      # new: only fetch when it is announced
                dist.broadcast(self.w, src=0)
                self.version += 1
                print(f"[rollout] rank 1 has weights {self.version}", flush=True)


class Trainer:
    def __init__(self, store):
        self.store, self.version = store, 0
        self.w = torch.zeros(20)
        store.set("version", "0")

    def get_rollout(self):
        r = torch.empty(20)
        dist.recv(r, src=1)
        return r

    def sync_weights(self):
        print(f"[trainer] rank 0 sync_weights {self.version + 1} begins", flush=True)
        dist.broadcast(self.w, src=0)
        self.version += 1
        self.store.set("version", str(self.version))

    def run(self):
        for it in range(1, 10 ** 6):
            r = self.get_rollout()
            self.w += 0.1 * (r - self.w)
            if it % SYNC_EVERY == 0:
                self.sync_weights()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    st = dist.PrefixStore("rl", dist.distributed_c10d._get_default_store())
    role = Trainer if dist.get_rank() == 0 else RolloutWorker
    if dist.get_rank() == 0:
        t = role(st)
        dist.barrier()
    else:
        dist.barrier()
        t = role(st)
    t.run()
