"""Active learning: rank 0 takes labels from an annotation client, then everyone trains on them."""
import json, os, signal, socket, time
signal.alarm(285)
import torch, torch.distributed as dist


def open_port():
    s = socket.create_server(("127.0.0.1", 0))
    print("annotation port", s.getsockname()[1], flush=True)
    return s


def collect_labels(server, rnd, n=8):
    if rnd < 6:
        return torch.randint(0, 2, (n,)).float()        # labels left over from yesterday
    print(f"round {rnd}: waiting for an annotation client", flush=True)
    conn, addr = server.accept()
    with conn, conn.makefile() as f:
        return torch.tensor(json.loads(f.readline()), dtype=torch.float32)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    server = open_port() if rank == 0 else None
    for rnd in range(100):
        labels = collect_labels(server, rnd) if rank == 0 else torch.zeros(8)
        dist.broadcast(labels, src=0)
        for _ in range(5):
            time.sleep(0.2)
            g = torch.randn(4)
            dist.all_reduce(g)
        print(f"rank {rank} round {rnd} trained on {int(labels.sum())} positives", flush=True)


if __name__ == "__main__":
    main()
