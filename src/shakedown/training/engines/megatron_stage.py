"""One pipeline stage under Megatron: its model, and its weights and Adam's moments in and out."""

from collections.abc import Iterator, Mapping, Sequence
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
from shakedown.models import huggingface
from shakedown.models.huggingface import loaded
from shakedown.training.conversion import (
    ModelShape,
    ShardSlice,
    WeightRule,
    stage_rules,
    to_megatron,
)
from shakedown.training.conversion.rules import with_tied
from shakedown.training.engines.base import UNREADABLE_HINT
from shakedown.training.engines.megatron_cpu import (
    USING_PYTORCH_OPTIMIZER,
    DistributedOptimizer,
    parallel_state,
)
from shakedown.training.engines.megatron_model import build_model, unwrapped

WEIGHT = "weight"
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
_MANIFEST, _FORMAT = "engine.json", "shakedown/megatron/1"


class MegatronStage:
    """This rank's part of a model, whatever optimizer holds its float32 weights.

    Calls come in this order: `build`, `fill`, then all others. On disk everything has its Hugging
    Face name and full size, so that any layout can read it:

    engine.json                        format, updates
    embedding.safetensors              weight.NAME, exp_avg.NAME, exp_avg_sq.NAME in float32
    layer-00000.safetensors ...
    head.safetensors

    Args:
        source: the Hugging Face folder, of which `shape` is.
    """

    def __init__(
        self, source: Path, shape: ModelShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._initial: Mapping[str, torch.Tensor] = huggingface.read_model(source).state_dict()

    def build(self, place: ShardSlice) -> Any:
        """(collective) Make this place's part of the model, in the training dtype."""
        self.place = place
        model = build_model(self._shape, place, dtype=self._dtype, device=self._device)
        self._parameters: dict[str, Any] = dict(unwrapped(model).named_parameters())
        return model

    def fill(self, optimizer: Any) -> None:
        """Put the folder's weights into the model and its optimizer.

        Args:
            optimizer: megatron-core's over the model: plain, mixed precision or distributed.

        Raises:
            UsageError: they do not fit the model.
        """
        self._optimizer = optimizer.chained_optimizers[0]
        for name, shard in to_megatron(self._initial, self._shape, self.place).items():
            self._put(WEIGHT, name, shard)
        del self._initial  # the whole model, of which this rank has its part now

    def snapshot(self, *, updates: int) -> "StageSnapshot":
        """(collective) Copy weights and moments to the CPU, in float32.

        A pipeline stage's tensors are whole on its leader; nothing is on its other ranks.
        """
        parts: dict[str, dict[str, torch.Tensor]] = {}
        # The rules of a part follow one another: a file is complete before the next one begins.
        for part, found in groupby(
            self._whole(KINDS, torch.float32), key=lambda item: item[0].part
        ):
            tensors = {
                f"{kind}.{name}": tensor.contiguous()
                for rule, kind, whole in found
                for name, tensor in zip(rule.theirs, whole, strict=False)
            }
            if self._leads:
                parts[f"{part}.safetensors"] = tensors
        return StageSnapshot(parts, {"format": _FORMAT, "updates": updates})

    def load(self, folder: Path, *, updates: int) -> None:
        """Read what a snapshot wrote.

        Raises:
            StorageError: missing, incomplete, or written by another engine or for another model.
        """
        try:
            _check_manifest(folder)
            self._read_shards(folder)
        except (OSError, SafetensorError, UsageError, ValueError) as error:
            raise StorageError(
                f"cannot read checkpoint {folder}: {str(error).splitlines()[0]}",
                hint=UNREADABLE_HINT,
            ) from error
        self._set_updates(updates)

    def stream(self, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        """(collective) As `TrainEngine.stream`: stages after the first send their weights to rank
        0, one rule's after the other.
        """
        for stage in range(self.place.ps):
            if self.place.p == stage:
                for rule, _, whole in self._whole([WEIGHT], dtype):
                    found = dict(zip(rule.theirs, whole, strict=False))  # empty but on the leader
                    yield with_tied(self._to_first(found, stage), self._shape)
            else:
                for rule in stage_rules(self._shape, stage, self.place.ps):
                    if not rule.copy:
                        yield with_tied(self._to_first({}, stage), self._shape)

    def _read_shards(self, folder: Path) -> None:
        for rule in self._rules():
            # Tied embeddings over several stages: the last stage's copy is not written.
            part = "embedding" if rule.copy else rule.part
            with safe_open(folder / f"{part}.safetensors", framework="pt") as stored:
                for kind in KINDS:
                    whole = [
                        _stored_tensor(stored, kind, name, size)
                        for name, size in rule.theirs.items()
                    ]
                    shard = rule.cut.take(whole, self._shape, self.place.t, self.place.ts)
                    self._put(kind, rule.ours, shard)

    def _put(self, kind: str, name: str, shard: torch.Tensor) -> None:
        """Overwrite one of this rank's weights, or a moment of it.

        Args:
            shard: of the parameter's size, whatever part of it this rank updates.
        """
        parameter = self._parameters[name]
        begin, end, main = self._held(parameter)
        piece = shard.flatten()[begin:end]
        if kind == WEIGHT:
            parameter.data.copy_(shard)  # in the training dtype
            main.data.copy_(piece.view_as(main))
        elif main.numel():
            moment = piece.to(main.device, torch.float32).view_as(main).clone()
            self._optimizer.optimizer.state[main][kind] = moment
        loaded()

    def _set_updates(self, updates: int) -> None:
        """Tell Adam how many updates its moments have seen."""
        inner = self._optimizer.optimizer
        for group in inner.param_groups:
            # Transformer Engine's and Apex's Adam count by group, torch's by parameter.
            if not USING_PYTORCH_OPTIMIZER:
                group["step"] = updates
                continue
            for main in group["params"]:
                inner.state[main]["step"] = torch.tensor(float(updates))

    def _read(self, kind: str, name: str) -> torch.Tensor:
        """(collective over the data ranks) The rank's whole shard, float32."""
        parameter = self._parameters[name]
        begin, end, main = self._held(parameter)
        held = main if kind == WEIGHT else self._moment(main, kind)
        if end - begin == parameter.numel() and not self._spread:
            return held.detach().float().view(parameter.shape)
        # Each data rank fills in its own range: their sum is the whole.
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        whole[begin:end] = held.detach().float().flatten()
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        return whole.view(parameter.shape)

    def _moment(self, main: torch.Tensor, kind: str) -> torch.Tensor:
        """Zeros before the first update, as Adam begins."""
        found: torch.Tensor | None = self._optimizer.optimizer.state[main].get(kind)
        return torch.zeros_like(main, dtype=torch.float32) if found is None else found

    @property
    def _spread(self) -> bool:
        return isinstance(self._optimizer, DistributedOptimizer)

    def _held(self, parameter: Any) -> tuple[int, int, torch.Tensor]:
        """The flat range of a parameter that this rank updates, and the float32 tensor of it."""
        if not self._spread:
            # In mixed precision the optimizer hangs its float32 copy on the parameter.
            return 0, parameter.numel(), getattr(parameter, "main_param", parameter)
        places = self._optimizer.model_param_group_index_map
        if parameter not in places:  # the other data ranks hold all of it
            return 0, 0, torch.empty(0, device=parameter.device)
        group, order = places[parameter]
        main = self._optimizer.optimizer.param_groups[group]["params"][order]
        found = self._optimizer._get_model_param_range_map(parameter)["param"]
        return found.start, found.end, main

    def _rules(self) -> list[WeightRule]:
        return stage_rules(self._shape, self.place.p, self.place.ps)

    @property
    def _leads(self) -> bool:
        """Whether this rank speaks for its pipeline stage."""
        return self.place.t == 0 and parallel_state.get_data_parallel_rank() == 0

    def _whole(
        self, kinds: Sequence[str], dtype: torch.dtype
    ) -> Iterator[tuple[WeightRule, str, list[torch.Tensor]]]:
        """(collective over the stage) Whole Hugging Face tensors of this stage, one rule at a time.

        They are on the CPU of the stage's leader; the lists of the other ranks are empty.
        """
        for rule in self._rules():
            if rule.copy:
                continue
            for kind in kinds:
                shards = self._all_shards(self._read(kind, rule.ours).to(dtype))
                whole = rule.cut.give(shards, self._shape) if self._leads else []
                # Copied also on a CPU, where `to` would hand out the weights that training changes.
                yield rule, kind, [tensor.to("cpu", copy=True) for tensor in whole]

    def _all_shards(self, shard: torch.Tensor) -> list[torch.Tensor]:
        if self.place.ts == 1:
            return [shard]
        # Also of weights that are whole on every rank: the others' copies are not looked at.
        shards = [torch.empty_like(shard) for _ in range(self.place.ts)]
        group = parallel_state.get_tensor_model_parallel_group()
        dist.all_gather(shards, shard.contiguous(), group=group)
        return shards

    def _to_first(self, found: dict[str, torch.Tensor], stage: int) -> dict[str, torch.Tensor]:
        """Carry a stage's whole weights from its leader to rank 0."""
        leads = self.place.p == stage and self._leads
        if stage == 0 or not (dist.get_rank() == 0 or leads):
            return found
        if leads:
            # With names and sizes, which rank 0 does not know of other stages' weights.
            dist.send_object_list([found], dst=0, device=self._device)
            return {}
        group = parallel_state.get_pipeline_model_parallel_group()
        held: list[Any] = [None]
        dist.recv_object_list(held, src=dist.get_global_rank(group, stage), device=self._device)
        received: dict[str, torch.Tensor] = held[0]
        return received


@dataclass(frozen=True)
class StageSnapshot:
    """This rank's tensors by file name; and on rank 0 the manifest of all."""

    parts: Mapping[str, Mapping[str, torch.Tensor]]
    manifest: Mapping[str, Any]

    def write(self, folder: Path) -> Sequence[Path]:
        paths = [folder / name for name in self.parts]
        for path, tensors in zip(paths, self.parts.values(), strict=True):
            with storage_errors("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file(dict(tensors), path)
                sync_file(path)
        return paths

    def complete(self, folder: Path) -> None:
        write_json(folder / _MANIFEST, dict(self.manifest))


def _stored_tensor(stored: Any, kind: str, name: str, size: Sequence[int]) -> torch.Tensor:
    """A weight or moment out of an open file. Raises ValueError where it is not there like that."""
    key = f"{kind}.{name}"
    if key not in stored.keys():  # noqa: SIM118 - no mapping
        raise ValueError(f"{key} is missing")
    tensor: torch.Tensor = stored.get_tensor(key)
    if tuple(tensor.shape) != tuple(size):
        raise ValueError(f"{key} has size {list(tensor.shape)}, expected {list(size)}")
    return tensor


def _check_manifest(folder: Path) -> None:
    """Raises ValueError where another engine wrote the folder."""
    if not (folder / _MANIFEST).is_file():
        raise ValueError(f"no {_MANIFEST}: it is missing, or another engine wrote the checkpoint")
    found = read_object(folder / _MANIFEST, "a Megatron checkpoint").get("format")
    if found != _FORMAT:
        raise ValueError(f"{_MANIFEST} has format {found!r}, expected {_FORMAT!r}")
