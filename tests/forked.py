"""Ranks that are forked from one process which has imported everything: torch once, not N times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fork_ranks(world: int, store: Path, work: Callable[..., None], *args: Any) -> None:
    """Call `work(*args)` on `world` new processes that are one gloo group.

    For scripts: the caller must not have started threads or a process group.

    Args:
        store: a file that does not exist yet; its folder does.
    """
    mp.start_processes(_rank, (world, store, work, args), nprocs=world, start_method="fork")


def _rank(
    rank: int, world: int, store: Path, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    group = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=world)
    work(*args)
    dist.barrier()
    dist.destroy_process_group()
