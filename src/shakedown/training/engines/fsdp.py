"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state spread over all ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shakedown.config import OptimizerConfig
from shakedown.errors import StorageError
from shakedown.training import huggingface
from shakedown.training.data.batch import TokenBatch
from shakedown.training.engines.base import UNREADABLE_HINT, LossFunction, Scores
from shakedown.training.engines.schedule import learning_rate

# Below this many parameters one unit is gathered at once: one collective instead of one a layer.
ONE_UNIT_PARAMETERS = 50_000_000


class FsdpEngine:
    """A causal language model under FSDP2 with AdamW; world size 1 takes the same path."""

    def __init__(
        self, model: Any, *, source: Path, optimizer: OptimizerConfig, dtype: str, device: Any
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.data_rank, self.data_world_size = self.rank, self.world_size
        self.device = torch.device(device)
        self.source = source
        self.dtype = dtype
        self.model_config = model.config
        self.tokenizer = huggingface.read_tokenizer(source)
        self.updates = 0
        self.entropy_gradient = False
        self._settings = optimizer
        self._model = _shard(model, dtype=dtype, device=self.device, world_size=self.world_size)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,  # one call instead of one for each sharded parameter
        )

    @classmethod
    def build(
        cls,
        model: Path,
        *,
        optimizer: OptimizerConfig,
        dtype: str,
        device: torch.device,
        sizes: Mapping[str, int] | None = None,  # noqa: ARG003 - has one dimension, all ranks
    ) -> "FsdpEngine":
        huggingface.quiet()
        loaded = huggingface.read_model(model)
        return cls(loaded, source=model, optimizer=optimizer, dtype=dtype, device=device)

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: Callable[[int], None] | None = None,
    ) -> dict[str, float]:
        self._model.train()
        totals: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(batches):
            if on_micro_batch is not None:
                on_micro_batch(index)
            last = index == len(batches) - 1
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
            here = batch.to(self.device)
            part = loss(self._score(here, temperature), here, index)
            # FSDP averages gradients over ranks; the parts are meant to be added.
            (part.loss * self.world_size).backward()
            for name, value in {"loss": part.loss.detach(), **part.sums}.items():
                totals[name] = totals[name] + value if name in totals else value
        return {name: float(value) for name, value in totals.items()}

    def step(self) -> float:
        norm = self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1
        return norm

    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        self._model.eval()
        with torch.no_grad():
            return [self._score(b.to(self.device), temperature).logprobs.cpu() for b in batches]

    @property
    def learning_rate(self) -> float:
        return learning_rate(self._settings, self.updates)

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        try:
            dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer)
        except (dcp.api.CheckpointException, OSError) as error:
            raise StorageError(
                f"cannot write checkpoint {folder}: {_first_reason(error)}",
                hint="free space on that file system; the checkpoint before it is kept",
            ) from error

    def load(self, folder: Path, *, updates: int) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        except (dcp.api.CheckpointException, OSError) as error:
            raise StorageError(
                f"cannot read checkpoint {folder}: {_first_reason(error)}",
                hint=UNREADABLE_HINT,
            ) from error
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.updates = updates

    def gather(self) -> dict[str, torch.Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, torch.Tensor] = get_model_state_dict(self._model, options=options)
        return weights

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        huggingface.write_folder(
            self._model, weights, source=self.source, folder=folder, dtype=self.dtype
        )

    def _score(self, batch: TokenBatch, temperature: float) -> Scores:
        """Run the model and keep only the positions before trained tokens."""
        columns = batch.mask.any(0).nonzero()[:, 0]
        if columns.numel() == 0:  # nothing to train here; the collectives still have to match
            columns = torch.ones(1, dtype=torch.int64, device=self.device)
        # No attention mask: padding stands after every token that counts, and attention is causal.
        logits = self._model(
            input_ids=batch.tokens[:, :-1],
            logits_to_keep=columns - 1,
            use_cache=False,
        ).logits
        mask = batch.mask[:, columns]
        kept = logits[mask].float() / temperature
        normaliser = kept.logsumexp(-1)
        chosen = kept.gather(1, batch.tokens[:, columns][mask][:, None])[:, 0]
        logprobs = chosen - normaliser
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            shifted = kept - normaliser[:, None]
            entropy = -(shifted.exp() * shifted).sum(-1)
        return Scores(logprobs, entropy)

    def _clip(self) -> float:
        """Clip by the global norm with one collective, as each rank holds a slice of every one."""
        slices = [p.grad.to_local() for p in self._parameters if p.grad is not None]
        squares = torch.nn.utils.get_total_norm(slices).float() ** 2
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        scale = self._settings.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(slices, scale)
        return norm


def _shard(model: Any, *, dtype: str, device: torch.device, world_size: int) -> Any:
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters >= ONE_UNIT_PARAMETERS:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _first_reason(error: BaseException) -> str:
    """The cause that one rank met, out of a checkpoint error of all ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        return f"rank {rank}: {_plain_reason(wrapped[0])}"
    return _plain_reason(error)


def _plain_reason(error: BaseException) -> str:
    """torch.save answers a write that was cut short with an internal error of its own."""
    text = str(error).strip() or type(error).__name__
    if any(mark in text for mark in ("unexpected pos", "PytorchStreamWriter")):
        return "a write was cut short: the file system is full, or a quota or limit is reached"
    return text.splitlines()[0]
