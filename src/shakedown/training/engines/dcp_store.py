"""A sharded torch model and its optimizer in torch.distributed.checkpoint's format.

`dcp.async_save` makes its plan and ends by collectives in a thread: that takes a process group
beside the training's, and a peer that dies leaves the thread waiting in it. Here the main threads
plan together, once, as names and shapes do not change. A thread then only calls the writer's
`write_data`, and rank 0 its `finish`, with the ranks' results out of their files. Planner and
writer are torch's own public classes, so `dcp.load` reads the folder on any number of ranks.
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from shakedown.core.errors import StorageError, storage_hint
from shakedown.core.folders import storage_errors, sync_file
from shakedown.models.huggingface import loaded
from shakedown.training.engines.base import UNREADABLE_HINT
from shakedown.training.engines.dcp_pickle import read_records


class DcpStore:
    """Copies a state of tensors, whole or DTensors; every rank has one.

    Args:
        state: what this rank holds; names and shapes must not change between calls.
    """

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state
        self._planned: tuple[SavePlan, Metadata | None] | None = None
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    def snapshot(self) -> "DcpSnapshot":
        """(collective) Copy to the CPU what this rank is to write: no tensor is written twice."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(self._state()), is_coordinator=dist.get_rank() == 0)
        if self._planned is None:
            self._planned = _plan_together(planner)
        plan, metadata = self._planned
        held = {item.index: self._copy(item, planner.resolve_data(item)) for item in plan.items}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies into pinned memory are still on their way
        return DcpSnapshot(plan, metadata, held, dist.get_rank(), dist.get_world_size())

    def _copy(self, item: WriteItem, found: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
        """Into the memory of the snapshot before: pinned memory is dear to get."""
        if isinstance(found, io.BytesIO):
            return found
        buffer = self._buffers.get(item.index)
        if buffer is None:
            pinned = found.device.type == "cuda"
            buffer = torch.empty(found.shape, dtype=found.dtype, pin_memory=pinned)
            self._buffers[item.index] = buffer
        return buffer.copy_(found.detach(), non_blocking=True)


class LoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """torch's own, that beats for every tensor it has read and runs no code out of a file."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        loaded()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch unpickles everything but tensors: it gets a pickle of our own, of plain values.
        plain = io.BytesIO()
        try:
            torch.save(torch.load(value, weights_only=True), plain)
        except pickle.UnpicklingError as error:
            raise StorageError(f"{read_item.dest_index.fqn} is more than a plain value") from error
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's own, for a folder that somebody else may have written."""

    def read_metadata(self) -> Metadata:
        found = read_records(Path(self.path, ".metadata"))
        if not isinstance(found, Metadata):
            raise StorageError(f"{self.path}/.metadata is not metadata but {type(found).__name__}")
        for each in found.storage_data.values():
            if Path(each.relative_path).name != each.relative_path:
                raise StorageError(f"{each.relative_path!r} is not in {self.path}")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


def read_state(state: dict[str, Any], folder: Path) -> None:
    """(collective) Fill `state` with what was written, on this number of ranks or another.

    Raises:
        StorageError: it cannot be read or is not complete.
    """
    try:
        dcp.load(state, storage_reader=_Reader(folder), planner=LoadPlanner())
    except (dcp.api.CheckpointException, OSError) as error:
        raise StorageError(
            f"cannot read checkpoint {folder}: {first_reason(error)}",
            hint=UNREADABLE_HINT,
        ) from error


@dataclass(frozen=True)
class DcpSnapshot:
    """One rank's share, by the plan of all. `metadata`: on rank 0 alone."""

    plan: SavePlan
    metadata: Metadata | None
    held: Mapping[MetadataIndex, torch.Tensor | io.BytesIO]
    rank: int
    world_size: int

    def write(self, folder: Path) -> Sequence[Path]:
        results = folder / _results_name(self.rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = _writer(folder).write_data(self.plan, _Held(self.held)).value()
            results.write_bytes(pickle.dumps(written))
            sync_file(results)
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"cannot write checkpoint {folder}: {_plain_reason(error)}",
                hint=f"{storage_hint(error)}; the checkpoint before it is kept",
            ) from error
        return sorted(folder.glob(f"__{self.rank}_*"))  # torch's names: __3_0.distcp of rank 3

    def complete(self, folder: Path) -> None:
        if self.metadata is None:
            raise ValueError("only rank 0 can complete a checkpoint: it has the plan of all")
        names = [folder / _results_name(rank) for rank in range(self.world_size)]
        with storage_errors("write checkpoint", folder):
            results = [read_records(name) for name in names]
            # A copy, as `finish` writes into it where each tensor lies, and the plan is used again.
            _writer(folder).finish(replace(self.metadata), results)
            for name in names:
                name.unlink()


class _Held(DefaultSavePlanner):  # type: ignore[misc]
    """Gives the writer the copies in place of the state."""

    def __init__(self, held: Mapping[MetadataIndex, torch.Tensor | io.BytesIO]) -> None:
        super().__init__()
        self._held = held

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._held[write_item.index]


def _plan_together(planner: DefaultSavePlanner) -> tuple[SavePlan, Metadata | None]:
    """(collective) What this rank writes, and on rank 0 the metadata of the whole."""
    leads = dist.get_rank() == 0
    plans: list[Any] | None = [None] * dist.get_world_size() if leads else None
    dist.gather_object(planner.create_local_plan(), plans)
    whole: Metadata | None = None
    if plans is not None:
        plans, whole = planner.create_global_plan(plans)
        plans = _writer(Path()).prepare_global_plan(plans)  # names the files; touches no folder
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans)
    return planner.finish_plan(mine[0]), whole


def _writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)


def _results_name(rank: int) -> str:
    return f"results-rank{rank}"


def first_reason(error: BaseException) -> str:
    """The cause that one rank met, out of a checkpoint error of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        return f"rank {rank}: {_plain_reason(wrapped[0])}"
    return _plain_reason(error)


def _plain_reason(error: BaseException) -> str:
    """torch.save answers a write that was cut short with an internal error of its own."""
    text = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    # "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598" (torch 2.13), or
    # "PytorchStreamWriter failed writing file data/0: file write failed"
    if any(mark in text for mark in ("unexpected pos", "PytorchStreamWriter")):
        return "a write was cut short: the file system is full, or a quota or limit is reached"
    return text.splitlines()[0]
