"""A driver with two Ray actors, as a lab's: it knows nothing of shakedown."""

import os
import sys
import time

import ray


@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
class Worker:
    def step(self) -> tuple[str, int]:
        time.sleep(0.2)
        return ray.get_runtime_context().get_node_id()[:8], os.getpid()


ray.init()
workers = [Worker.remote() for _ in range(2)]
print("living nodes:", len([n for n in ray.nodes() if n["Alive"]]), flush=True)
for step in range(1, int(sys.argv[1]) + 1):
    where = ray.get([worker.step.remote() for worker in workers])
    print(
        f"step {step} nodes={len({node for node, _ in where})}", *(p for _, p in where), flush=True
    )
