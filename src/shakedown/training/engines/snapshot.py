"""A training state on its way to disk: copied while the step stands still, written beside it.

An engine copies (`Engine.snapshot`, collective), a thread of each rank writes what its rank copied,
and rank 0 completes the folder when all have written. The threads use no collective: those of two
threads would mix, and a peer that died would be waited for.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from shakedown.core.errors import StorageError


class Snapshot(Protocol):
    """This rank's copy of the state in CPU memory, valid until the engine's next one."""

    def write(self, folder: Path) -> Sequence[Path]:
        """(any thread) Write this rank's files and flush them to disk; returns those that stay.

        Raises:
            StorageError: they cannot be written.
        """

    def complete(self, folder: Path) -> None:
        """(rank 0, when all ranks have written) Write what makes one checkpoint of the files.

        Raises:
            StorageError: it cannot be written, or a rank's part is not there.
        """


def save_now(snapshot: Snapshot, folder: Path) -> None:
    """(collective) Write a snapshot while everybody waits.

    Raises:
        StorageError: on every rank, when one of them could not write.
    """
    rank, failure = dist.get_rank(), ""
    try:
        snapshot.write(folder)
    except StorageError as error:
        failure = str(error)
    raise_together(failure)  # from here on every rank's files are there
    try:
        if rank == 0:
            snapshot.complete(folder)
    except StorageError as error:
        failure = str(error)
    raise_together(failure)


def raise_together(failure: str) -> None:
    """(collective) Raise on all ranks what one of them met; empty: this rank met nothing.

    Raises:
        StorageError: the first rank's failure, by its number.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, failure)
    for rank, text in enumerate(told):
        if text:
            raise StorageError(f"the checkpoint was not written: rank {rank}: {text}")
