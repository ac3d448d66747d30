import signal, time
signal.alarm(285)
import numpy as np, torch, torch.distributed as dist


class TreeScorer:
    def __init__(self, rank):
        self.rng = np.random.default_rng(rank)
        self.rank = rank

    def likelihood(self, sites):
        m = np.eye(20)
        for _ in range(sites):
            q = self.rng.random((20, 20))
            m = m @ (q / q.sum(1, keepdims=True))
            m /= m.max()
            time.sleep(0.015)
        return float(np.log(np.abs(m).sum()))


dist.init_process_group("gloo")
scorer = TreeScorer(dist.get_rank())
best = None
for generation in range(1000):
    score = torch.tensor([scorer.likelihood(600 if scorer.rank == 0 else 1900)])
    dist.all_reduce(score, op=dist.ReduceOp.MAX)
    best = score if best is None else torch.maximum(best, score)
