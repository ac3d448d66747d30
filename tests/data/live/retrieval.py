import contextlib, fcntl, os, signal, tempfile, time
signal.alarm(285)
import torch
import torch.distributed as dist

CACHE = os.path.join(tempfile.gettempdir(), "live_retrieval_cache")


@contextlib.contextmanager
def cache_lock():
    os.makedirs(CACHE, exist_ok=True)
    with open(os.path.join(CACHE, "index.lock"), "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def build_index():
    rank = int(os.environ["RANK"])
    time.sleep(3 * rank)
    with cache_lock():
        path = os.path.join(CACHE, "index.pt")
        if not os.path.exists(path):
            torch.save(torch.randn(100, 8), path)
        index = torch.load(path)
        setup()
    return index


def setup():
    dist.init_process_group("gloo")
    print("rank", dist.get_rank(), "joined", flush=True)


def main():
    index = build_index()
    while True:
        q = torch.randn(8)
        dist.broadcast(q, 0)
        score = (index @ q).max()
        dist.all_reduce(score, op=dist.ReduceOp.MAX)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
