"""A driver with a group of Ray actors that have ranks, as trainers on Ray: knows nothing of shakedown.

An actor learns its rank after its process has started. `--loop-on FILE`: rank 2 spins while it is there.
"""

import argparse
import os
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
class PolicyWorker:
    def __init__(self, rank: int, world: int) -> None:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
        self.rank = rank

    def step(self, loop_on: str) -> int:
        time.sleep(0.2)
        while loop_on and self.rank == 2 and Path(loop_on).exists():
            pass
        return os.getpid()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


@ray.remote(num_cpus=0)
class RewardWorker:
    def score(self) -> float:
        return 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--loop-on", default="")
    args = parser.parse_args()
    ray.init()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    workers = [
        PolicyWorker.options(scheduling_strategy=places[rank % len(nodes)]).remote(rank, args.ranks)
        for rank in range(args.ranks)
    ]
    rewards = RewardWorker.remote()
    for step in range(1, args.steps + 1):
        pids = ray.get([worker.step.remote(args.loop_on) for worker in workers])
        reward = ray.get(rewards.score.remote())
        print(f"step {step} reward={reward} pids={' '.join(map(str, pids))}", flush=True)
    used = {ray.get(worker.node.remote()) for worker in workers}
    print(f"{len(workers)} policy workers on {len(used)} node(s)", flush=True)


main()
