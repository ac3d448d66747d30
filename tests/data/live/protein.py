"""Folding head on frozen weights; each rank fetches its weights before it joins the group."""
import os, signal, socket, time
signal.alarm(285)
import torch
import torch.distributed as dist


def mirror_for(rank):
    server = socket.create_server(("127.0.0.1", 0))      # rank 2's mirror takes the connection and sends nothing
    return server


def download(rank):
    if rank != 2:
        time.sleep(0.5)
        return torch.randn(10, 10)
    server = mirror_for(rank)
    with socket.create_connection(server.getsockname()) as s:
        s.sendall(b"GET /esm-toy.bin HTTP/1.0\r\n\r\n")
        buf = b""
        while len(buf) < 400:
            buf += s.recv(1024)
    return torch.frombuffer(bytearray(buf[:400]), dtype=torch.float32).view(10, 10)


def load_pretrained():
    rank = int(os.environ["RANK"])
    print(f"rank {rank}: fetching weights", flush=True)
    w = download(rank)
    print(f"rank {rank}: weights ready", flush=True)
    return w


def main():
    w = load_pretrained()
    dist.init_process_group("gloo")
    while True:
        g = torch.randn(10)
        dist.all_reduce(g)
        w[0] += 0.01 * g
        time.sleep(0.2)


if __name__ == "__main__":
    main()
