"""Weights and Adam's moments of a Megatron rank, in and out, whatever optimizer holds them.

On disk everything has its Hugging Face name and full size, so that any layout can read it:

engine.json                        format, updates
embedding.safetensors              weight.NAME, exp_avg.NAME, exp_avg_sq.NAME in float32
layer-00000.safetensors ...
head.safetensors
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shakedown.core.errors import StorageError, UsageError
from shakedown.core.files import read_object, write_json
from shakedown.core.folders import storage_errors, sync_file
from shakedown.models.load_progress import loaded
from shakedown.training.conversion import ModelShape, Rule, ShardSlice, stage_rules
from shakedown.training.engines.base import UNREADABLE_HINT
from shakedown.training.engines.megatron_cpu import (
    USING_PYTORCH_OPTIMIZER,
    DistributedOptimizer,
    parallel_state,
)

FORMAT = "shakedown/megatron/1"
WEIGHT = "weight"
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
_MANIFEST = "engine.json"


class MegatronState:
    """This rank's float32 weights and moments, by rule.

    Args:
        model: the stage's module, whose parameters have Megatron's names.
        optimizer: megatron-core's optimizer over it: plain, mixed precision or distributed.
    """

    def __init__(self, model: Any, optimizer: Any, shape: ModelShape, place: ShardSlice) -> None:
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer.chained_optimizers[0]
        self._shape, self._place = shape, place
        self._rules = stage_rules(shape, place.p, place.ps)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its pipeline stage."""
        return self._place.t == 0 and parallel_state.get_data_parallel_rank() == 0

    def put(self, kind: str, shards: Mapping[str, torch.Tensor]) -> None:
        """Overwrite this rank's weights or moments; shards by Megatron's name."""
        for name, shard in shards.items():
            parameter = self._parameters[name]
            begin, end, main = self._held(parameter)
            piece = shard.flatten()[begin:end]
            if kind == WEIGHT:
                parameter.data.copy_(shard)
                main.data.copy_(piece.view_as(main))
            elif main.numel():
                moment = piece.to(main.device, torch.float32).view_as(main).clone()
                self._optimizer.optimizer.state[main][kind] = moment
            loaded()

    def set_updates(self, updates: int) -> None:
        """Tell Adam how many updates its moments have seen."""
        inner = self._optimizer.optimizer
        for group in inner.param_groups:
            if not USING_PYTORCH_OPTIMIZER:
                group["step"] = updates
                continue
            for main in group["params"]:
                inner.state[main]["step"] = torch.tensor(float(updates))

    def stage(self, kinds: Iterable[str]) -> Iterator[tuple[Rule, str, list[torch.Tensor]]]:
        """(collective over the stage) Whole Hugging Face tensors of this stage, one rule at a time.

        They are on the CPU of the stage's leader; the lists of the other ranks are empty.
        """
        for rule in self._rules:
            if rule.copy:
                continue
            for kind in kinds:
                shards = self._all_shards(self._read(kind, rule.ours))
                whole = rule.cut.give(shards, self._shape) if self.leads else []
                yield rule, kind, [tensor.to("cpu", copy=True) for tensor in whole]

    def _read(self, kind: str, name: str) -> torch.Tensor:
        """(collective over the data ranks) The rank's whole shard, float32."""
        parameter = self._parameters[name]
        begin, end, main = self._held(parameter)
        held = main if kind == WEIGHT else self._moment(main, kind)
        if end - begin == parameter.numel() and not self._spread:
            return held.detach().float().view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        whole[begin:end] = held.detach().float().flatten()
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        return whole.view(parameter.shape)

    def _moment(self, main: torch.Tensor, kind: str) -> torch.Tensor:
        """Zeros before the first update, as Adam begins."""
        found: torch.Tensor | None = self._optimizer.optimizer.state[main].get(kind)
        return torch.zeros_like(main, dtype=torch.float32) if found is None else found

    def _all_shards(self, shard: torch.Tensor) -> list[torch.Tensor]:
        if self._place.ts == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self._place.ts)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(shards, shard.contiguous(), group=group)
        return shards

    @property
    def _spread(self) -> bool:
        return isinstance(self._optimizer, DistributedOptimizer)

    def _held(self, parameter: Any) -> tuple[int, int, torch.Tensor]:
        """The flat range of a parameter that this rank updates, and the float32 tensor of it."""
        if not self._spread:
            return 0, parameter.numel(), getattr(parameter, "main_param", parameter)
        places = self._optimizer.model_param_group_index_map
        if parameter not in places:  # the other data ranks hold all of it
            return 0, 0, torch.empty(0, device=parameter.device)
        group, order = places[parameter]
        main = self._optimizer.optimizer.param_groups[group]["params"][order]
        found = self._optimizer._get_model_param_range_map(parameter)["param"]
        return found.start, found.end, main


@dataclass(frozen=True)
class StageSnapshot:
    """A pipeline stage's whole tensors by file name, on its leader; nothing on other ranks."""

    parts: Mapping[str, Mapping[str, torch.Tensor]]
    updates: int

    def write(self, folder: Path) -> Sequence[Path]:
        paths = [folder / name for name in self.parts]
        for path, tensors in zip(paths, self.parts.values(), strict=True):
            with storage_errors("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(dict(tensors), path)
                sync_file(path)
        return paths

    def complete(self, folder: Path) -> None:
        write_json(folder / _MANIFEST, {"format": FORMAT, "updates": self.updates})


def snapshot_stage(state: MegatronState, *, updates: int) -> StageSnapshot:
    """(collective) Copy this stage to its leader's CPU memory, whole and in float32."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for part, found in groupby(state.stage(KINDS), key=lambda item: item[0].part):
        tensors = {
            f"{kind}.{name}": tensor.contiguous()
            for rule, kind, whole in found
            for name, tensor in zip(rule.theirs, whole, strict=False)
        }
        if state.leads:
            parts[f"{part}.safetensors"] = tensors
    return StageSnapshot(parts, updates)


def load_stage(
    state: MegatronState, folder: Path, *, shape: ModelShape, place: ShardSlice, updates: int
) -> None:
    """Read what a snapshot wrote, at any layout.

    Raises:
        StorageError: missing, incomplete, or written by another engine or for another model.
    """
    try:
        _check_manifest(folder)
        for rule in stage_rules(shape, place.p, place.ps):
            part = "embedding" if rule.copy else rule.part
            with safe_open(folder / f"{part}.safetensors", framework="pt") as stored:
                for kind in KINDS:
                    whole = [
                        _stored(stored, kind, name, size) for name, size in rule.theirs.items()
                    ]
                    state.put(kind, {rule.ours: rule.cut.take(whole, shape, place.t, place.ts)})
    except (OSError, SafetensorError, UsageError, ValueError) as error:
        raise StorageError(
            f"cannot read checkpoint {folder}: {str(error).splitlines()[0]}",
            hint=UNREADABLE_HINT,
        ) from error
    state.set_updates(updates)


def _check_manifest(folder: Path) -> None:
    if not (folder / _MANIFEST).is_file():
        raise ValueError(f"no {_MANIFEST}: it is missing, or another engine wrote the checkpoint")
    found = read_object(folder / _MANIFEST, "a Megatron checkpoint").get("format")
    if found != FORMAT:
        raise ValueError(f"{_MANIFEST} has format {found!r}, expected {FORMAT!r}")


def _stored(stored: Any, kind: str, name: str, size: tuple[int, ...]) -> torch.Tensor:
    key = f"{kind}.{name}"
    if key not in stored.keys():  # noqa: SIM118 - no mapping
        raise ValueError(f"{key} is missing")
    tensor: torch.Tensor = stored.get_tensor(key)
    if tuple(tensor.shape) != size:
        raise ValueError(f"{key} has size {list(tensor.shape)}, expected {list(size)}")
    return tensor
