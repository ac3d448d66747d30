"""The rows that a rank reads in each step, from a cache that another program of the lab fills."""

import fcntl
from pathlib import Path


def read_cache(folder: Path, rank: int) -> None:
    """Whoever fills a rank's part holds its lock; while it is marked as busy the rank asks again."""
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / f"rank{rank}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
    while (folder / f"rank{rank}.busy").exists():
        pass
