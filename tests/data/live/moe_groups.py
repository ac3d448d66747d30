"""Two process groups over the same two ranks: dense gradients and expert gradients."""
import signal, time
signal.alarm(285)
import torch
import torch.distributed as dist


def sync_dense(grad, dense_group):
    dist.all_reduce(grad, group=dense_group)


def sync_experts(grad, expert_group):
    dist.all_reduce(grad, group=expert_group)


def train_step(rank, step, dense_group, expert_group):
    tokens = torch.randn(32, 8)
    dense, experts = tokens.mean(0), tokens.std(0)
    time.sleep(0.3)
    overflow = rank == 1 and step >= 15
    if overflow:
        sync_experts(experts, expert_group)     # send the overflow away first
        sync_dense(dense, dense_group)
    else:
        sync_dense(dense, dense_group)
        sync_experts(experts, expert_group)
    if step % 5 == 0:
        print(f"rank {rank} step {step} ok", flush=True)


def main():
    dist.init_process_group("gloo")
    dense_group = dist.new_group([0, 1])
    expert_group = dist.new_group([0, 1])
    for step in range(100000):
        train_step(dist.get_rank(), step, dense_group, expert_group)


if __name__ == "__main__":
    main()
