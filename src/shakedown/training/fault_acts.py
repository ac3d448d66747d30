"""Acts of injected faults on a running process; imports without torch."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from shakedown.training.batch import TokenBatch

SLOW_SECONDS = 8.0  # above three usual steps of the demo, below the shortest stall timeout
_GARBAGE = 2_000_000  # containers; one full collection walks over all of them
_ONE_COLUMN = 1


@dataclass(frozen=True)
class Strike:
    """`culprit`: this is the configured rank. `subject`: what the fault may change."""

    culprit: bool = True
    subject: Any = None


class SwallowedError(Exception):
    """An error of one rank's step that the rank's own code catches and says nothing about."""


class DataEndedError(Exception):
    """One rank has no further batch."""


def _tensor(values: Sequence[float]) -> Any:
    """On the GPU where there is one, so that the collective is of the trainer's own backend."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(values, dtype=torch.float64, device=device)


def conditional_collective(_strike: Strike) -> None:
    """One rank reduces a number for its log; the others know nothing of it."""
    import torch.distributed as dist

    number = _tensor([1.0])
    dist.all_reduce(number)
    number.item()


def exception_in_cleanup(_strike: Strike) -> NoReturn:
    """The rank leaves its step silently and goes on to the barrier of the cleanup."""
    raise SwallowedError


def busy_rank(_strike: Strike) -> None:
    """Endless work in Python: the rank holds the interpreter and joins no collective."""
    count = 0
    while True:
        count = (count + 1) % 1_000_003


def long_collection(_strike: Strike) -> None:
    """One garbage collection after the other over a large heap, as with a leak of objects."""
    heap = [[None] for _ in range(_GARBAGE)]
    while heap:
        gc.collect()


def stop_process(_strike: Strike) -> None:
    """The process stops itself, as a frozen node or a debugger would."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_process(_strike: Strike) -> None:
    """The process dies silently, as when the kernel is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_for_ever(_strike: Strike) -> None:
    """Wait forever."""
    while True:
        time.sleep(3600)


class _Locked:
    """A data set whose samples need a lock, as those of libraries with threads do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


def dataloader_worker(_strike: Strike) -> None:
    """The lock is held when the worker is forked: nobody is left in it to give it back."""
    from torch.utils.data import DataLoader

    rows = _Locked()
    # fork copies the lock as it is held here; a spawned worker would get a pickled data set, and a
    # lock cannot be pickled.
    with rows.lock:
        next(iter(DataLoader(rows, num_workers=1, multiprocessing_context="fork")))


def out_of_data(_strike: Strike) -> NoReturn:
    """The rank's data ends before the others': it goes on to what comes after the last step."""
    raise DataEndedError


def op_mismatch(strike: Strike) -> None:
    """The rank's sums are gathered and added up here; the others reduce them."""
    import torch
    import torch.distributed as dist

    def gathered(values: Mapping[str, float]) -> dict[str, float]:
        names = sorted(values)
        own = _tensor([values[name] for name in names])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return dict(zip(names, torch.stack(parts).sum(0).tolist(), strict=True))

    # On the instance, so from this step on. The numbers stay the same: only the collective differs.
    strike.subject.ranks.sum = gathered


def size_mismatch(strike: Strike) -> None:
    """The rank reports a thousand numbers more in its sums than the others."""
    ranks = strike.subject.ranks
    reduce: Callable[[Mapping[str, float]], dict[str, float]] = ranks.sum
    more = {f"fault-{number}": 1.0 for number in range(1000)}
    ranks.sum = lambda values: reduce({**values, **more})


def _change_batches(
    strike: Strike, change: Callable[[Sequence["TokenBatch"]], Sequence["TokenBatch"]]
) -> None:
    engine = strike.subject.engine
    train = engine.forward_backward

    def changed(batches: Sequence["TokenBatch"], *args: Any, **options: Any) -> Any:
        return train(change(batches), *args, **options)

    engine.forward_backward = changed


def fewer_micro_batches(strike: Strike) -> None:
    """A stage of a pipeline runs one micro batch less than its neighbours.

    Where data ranks communicate once a step alone, as FSDP2 does here, nothing hangs of it.
    """
    _change_batches(strike, lambda batches: batches[:-1])


def wrong_shape(strike: Strike) -> None:
    """The rank cuts the last column of tokens off, as with a collation of its own."""

    def narrower(batch: "TokenBatch") -> "TokenBatch":
        width = batch.tokens.shape[1] - _ONE_COLUMN
        extra = {k: v if v.dim() == 1 else v[:, :width] for k, v in batch.extra.items()}
        # The lengths too: the batch stays valid, only narrower than the neighbours'.
        return replace(
            batch,
            tokens=batch.tokens[:, :width],
            lengths=batch.lengths.clamp(max=width),
            mask=batch.mask[:, :width],
            extra=extra,
        )

    _change_batches(strike, lambda batches: [narrower(batch) for batch in batches])


def two_threads(_strike: Strike) -> None:
    """A thread reduces a number over the group that the main thread uses at the same time."""
    import torch.distributed as dist

    def reduce_in_background() -> None:
        dist.all_reduce(_tensor([1.0]))

    threading.Thread(target=reduce_in_background, name="fault-telemetry", daemon=True).start()


def cross_group_order(strike: Strike) -> None:
    """Two groups of all ranks; the culprit rank uses the second one first."""
    import torch.distributed as dist

    # new_group is collective over all ranks: hence this fault runs on every one of them.
    first, second = dist.new_group(), dist.new_group()
    order = (second, first) if strike.culprit else (first, second)
    for group in order:
        dist.all_reduce(_tensor([1.0]), group=group)


def storage_stall(_strike: Strike) -> None:
    """Make fsync block in a read(2) that is never answered, as on a lost NFS server."""
    # A read from a pipe whose writing end is closed would return at once.
    silent, _held_open = os.pipe()

    def fsync(_file: Any) -> None:
        os.read(silent, 1)

    os.fsync = fsync  # type: ignore[assignment]


def slow_step(_strike: Strike) -> None:
    """Slow all ranks down: slow, not hung."""
    time.sleep(SLOW_SECONDS)


def staleness_zero(strike: Strike) -> None:
    """The controller never learns of new versions: the staleness rule then starts nothing more."""
    strike.subject.set_version = lambda _version: None
