"""One learner (rank 0), the others are actors, each with an environment in its own process."""
import os, signal, subprocess, sys, time
signal.alarm(285)
import torch
import torch.distributed as dist

ENV = """
import sys
n = 0
for line in sys.stdin:
    n += 1
    if n > 90:
        continue        # the simulator has lost its client
    print((n * 37) % 11, flush=True)
"""


class Environment:
    def __init__(self):
        self.proc = subprocess.Popen([sys.executable, "-c", ENV], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, action):
        self.proc.stdin.write(f"{action}\n")
        self.proc.stdin.flush()
        return float(self.proc.stdout.readline())


def play_episode(env, policy, length=15):
    traj = torch.zeros(length, 2)
    for t in range(length):
        a = int(torch.multinomial(policy, 1))
        traj[t] = torch.tensor([float(a), env.step(a)])
        time.sleep(0.05)
    return traj


def actor():
    env, policy = Environment(), torch.ones(4) / 4
    while True:
        dist.send(play_episode(env, policy), dst=0)
        dist.recv(policy, src=0)


def learner():
    policy, n = torch.ones(4) / 4, 0
    while True:
        traj = torch.zeros(15, 2)
        src = dist.recv(traj)
        for a, r in traj.tolist():
            policy[int(a)] += 1e-3 * r
        policy /= policy.sum()
        dist.send(policy, dst=src)
        n += 1
        print(f"learner: trajectory {n} from actor {src}, return {traj[:, 1].sum().item():.0f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    learner() if dist.get_rank() == 0 else actor()
