"""Rank 0 drives agents with asyncio and broadcasts their transcripts; rank 1 trains on them."""
import asyncio, random, signal, time
signal.alarm(285)
import torch
import torch.distributed as dist


class ToolServer:
    def __init__(self):
        self.inbox = asyncio.Queue()
        self.calls = 0

    async def call(self, tool, arg):
        self.calls += 1
        fut = asyncio.get_running_loop().create_future()
        if self.calls <= 70:
            asyncio.get_running_loop().call_later(random.uniform(0.05, 0.2), fut.set_result, len(arg))
        else:
            await self.inbox.put((tool, arg, fut))      # nobody reads this inbox
        return await fut


async def episode(server, k):
    total = 0
    for turn in range(3):
        total += await server.call("search", "q" * (k + turn))
    return {"episode": k, "reward": total}


async def get_rollouts(server, n):
    return await asyncio.gather(*(episode(server, k) for k in range(n)))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loop, server = asyncio.new_event_loop(), ToolServer()
    for it in range(10000):
        box = [None]
        if rank == 0:
            box[0] = loop.run_until_complete(get_rollouts(server, 4))
        dist.broadcast_object_list(box, src=0)
        r = sum(e["reward"] for e in box[0])
        time.sleep(0.2)
        if rank == 1:
            print(f"iteration {it} reward {r}", flush=True)


if __name__ == "__main__":
    main()
