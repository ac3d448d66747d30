import os, signal, time
signal.alarm(285)
import torch, torch.distributed as dist


class Distributed:
    def __enter__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        return self

    def __exit__(self, *exc):
        dist.barrier()                 # leave together
        dist.destroy_process_group()


def sample_neighbours(graph, node):
    return graph[node]


def train(ctx, graph):
    emb = torch.randn(50, 8)
    for step in range(100000):
        node = step % 50 if ctx.rank != 2 else step % 51 + (30 if step > 19 else 0)
        agg = emb[sample_neighbours(graph, node)].mean(0)
        dist.all_reduce(agg)
        emb[node % 50] += 0.01 * agg
        time.sleep(0.25)
        if ctx.rank == 0 and step % 8 == 0:
            print("step", step, flush=True)


if __name__ == "__main__":
    with Distributed() as ctx:
        train(ctx, {i: [(i + 1) % 50, (i + 7) % 50] for i in range(50)})
