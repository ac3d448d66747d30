import os, signal, tempfile, threading, time
_end = threading.Timer(280, lambda: os._exit(4)); _end.daemon = True; _end.start()
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

MOUNT = os.path.join(tempfile.gettempdir(), f"live_corpus_{os.environ.get('RANK', '0')}")


def mount():
    os.makedirs(MOUNT, exist_ok=True)
    for name in os.listdir(MOUNT):
        os.unlink(os.path.join(MOUNT, name))
    for i in range(40):
        p = os.path.join(MOUNT, f"part-{i:05d}.bin")
        if i >= 24:
            os.mkfifo(p)
        else:
            with open(p, "wb") as f:
                f.write(bytes(range(64)))


class Corpus(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        with open(os.path.join(MOUNT, f"part-{i:05d}.bin"), "rb") as f:
            return torch.tensor(list(f.read(64)), dtype=torch.float32)


def init_worker(_):
    signal.alarm(275)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mount()
    w = torch.zeros(64)
    loader = DataLoader(Corpus(), batch_size=4, num_workers=1, prefetch_factor=2, worker_init_fn=init_worker)
    for step, x in enumerate(loader):
        g = x.mean(0)
        dist.all_reduce(g)
        w -= 1e-3 * g
        time.sleep(0.5)
        print(f"rank {rank} step {step}", flush=True)


if __name__ == "__main__":
    main()
