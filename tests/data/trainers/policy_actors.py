"""A driver with a group of Ray actors that have ranks, as trainers on Ray: knows nothing of shakedown.

An actor learns its rank after its process has started; it reads its rows from `--cache FOLDER`.
`--out FOLDER`: the driver writes the actors' states there at each fifth step; `--resume FILE`: one of them.
"""

import argparse
import json
import os
import time
from pathlib import Path

import ray
from cache import read_cache
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
class PolicyWorker:
    def __init__(self, rank: int, world: int) -> None:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
        self.rank = rank
        self.updates = 0

    def load(self, updates: int) -> None:
        self.updates = updates

    def state(self) -> int:
        return self.updates

    def step(self, cache: Path) -> int:
        time.sleep(0.2)
        read_cache(cache, self.rank)
        self.updates += 1
        return os.getpid()

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


@ray.remote(num_cpus=0)
class RewardWorker:
    def score(self) -> float:
        return 1.0


def save(folder: Path, step: int, updates: list[int]) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "part").write_text(json.dumps({"step": step, "updates": updates}))
    (folder / "part").rename(folder / f"step_{step}.json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    ray.init()
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    workers = [
        PolicyWorker.options(scheduling_strategy=places[rank % len(nodes)]).remote(rank, args.ranks)
        for rank in range(args.ranks)
    ]
    rewards = RewardWorker.remote()
    first = 1
    if args.resume:
        saved = json.loads(Path(args.resume).read_text())
        ray.get([w.load.remote(n) for w, n in zip(workers, saved["updates"], strict=True)])
        first = saved["step"] + 1
    for step in range(first, args.steps + 1):
        pids = ray.get([worker.step.remote(args.cache) for worker in workers])
        reward = ray.get(rewards.score.remote())
        print(f"step {step} reward={reward} pids={' '.join(map(str, pids))}", flush=True)
        if args.out and step % 5 == 0:
            save(args.out, step, ray.get([worker.state.remote() for worker in workers]))
    used = {ray.get(worker.node.remote()) for worker in workers}
    print(f"{len(workers)} policy workers on {len(used)} node(s)", flush=True)


main()
