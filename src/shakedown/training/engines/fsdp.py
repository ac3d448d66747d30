"""FSDP2 (`fully_shard`): parameters, gradients and optimizer state spread over all ranks.

Over `t` ranks each layer is cut by tensor parallelism beforehand, over `d` FSDP shards the rest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from shakedown.config import OptimizerConfig
from shakedown.models import huggingface
from shakedown.training.batch import TokenBatch
from shakedown.training.engines.base import (
    NO_OPTIONS,
    EngineOptions,
    LossFunction,
    OnMicroBatch,
    Scores,
)
from shakedown.training.engines.dcp_store import DcpStore, load_model, model_state
from shakedown.training.engines.fsdp_model import (
    check_plan,
    join_mesh,
    local_part,
    spread,
    whole_over_tensor_ranks,
)
from shakedown.training.engines.schedule import learning_rate
from shakedown.training.engines.scoring import kept_columns, score
from shakedown.training.engines.sharded_load import fill, open_model
from shakedown.training.engines.snapshot import Snapshot, save_now


class FsdpEngine:
    """A causal language model under FSDP2 with AdamW."""

    def __init__(
        self,
        model: Any,
        *,
        source: Path,
        optimizer: OptimizerConfig,
        dtype: str,
        device: Any,
        sizes: Mapping[str, int] | None,
        options: EngineOptions,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device(device)
        mesh = join_mesh(self.device, sizes)
        self.data_rank, self.data_world_size = mesh.get_local_rank("d"), mesh["d"].size()
        self._leads_data_rank = mesh.get_local_rank("t") == 0
        self.source = source
        self.dtype = dtype
        self.model_config = model.config
        self.tokenizer = huggingface.read_tokenizer(source)
        self.updates = 0
        self.entropy_gradient = False
        self._settings = optimizer
        self._model = spread(model, mesh, dtype=dtype, device=self.device, options=options)
        fill(self._model, dict(self._model.named_parameters()), source, self.device)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,  # one call instead of one for each sharded parameter
        )
        self._store = DcpStore(lambda: model_state(self._model, self._optimizer))

    @classmethod
    def build(
        cls,
        model: Path,
        *,
        optimizer: OptimizerConfig,
        dtype: str,
        device: torch.device,
        sizes: Mapping[str, int] | None = None,
        options: EngineOptions = NO_OPTIONS,
    ) -> "FsdpEngine":
        huggingface.quiet()
        config, t = huggingface.read_config(model), (sizes or {}).get("t", 1)
        check_plan(config, t, device, options)
        return cls(
            open_model(model, config),
            source=model,
            optimizer=optimizer,
            dtype=dtype,
            device=device,
            sizes=sizes,
            options=options,
        )

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: OnMicroBatch | None = None,
    ) -> dict[str, float]:
        self._model.train()
        totals: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(batches):
            if on_micro_batch is not None:
                on_micro_batch(index, batches)
            self._expect(last=index == len(batches) - 1)
            here = batch.to(self.device)
            part = loss(self._score(here, temperature), here, index)
            # FSDP averages gradients over data ranks; the parts are meant to be added.
            (part.loss * self.data_world_size).backward()
            for name, value in {"loss": part.loss.detach(), **part.sums}.items():
                totals[name] = totals[name] + value if name in totals else value
        # Ranks that split one model found the same: one of them counts.
        return {name: float(v) if self._leads_data_rank else 0.0 for name, v in totals.items()}

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

    def snapshot(self) -> Snapshot:
        return self._store.snapshot()

    def save(self, folder: Path) -> None:
        save_now(self.snapshot(), folder)

    def load(self, folder: Path, *, updates: int) -> None:
        load_model(self._model, self._optimizer, folder)
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
        # No attention mask: padding stands after every token that counts, and attention is causal.
        logits = self._model(
            input_ids=batch.tokens[:, :-1],
            logits_to_keep=kept_columns(batch) - 1,
            use_cache=False,
        ).logits
        return score(logits, batch, temperature=temperature, entropy_gradient=self.entropy_gradient)

    def _expect(self, *, last: bool) -> None:
        """Whether the next backward pass is the last of this step: only that one communicates."""
        if not isinstance(self._model, FSDPModule):
            return
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        # Only for the root: layers of a large model give their memory back at once.
        self._model.set_reshard_after_backward(last, recurse=False)

    def _clip(self) -> float:
        """Clip by the global norm with one collective, as each rank holds a slice of every one."""
        found = [p for p in self._parameters if p.grad is not None]
        slices = [local_part(p.grad) for p in found]
        cut = [s for p, s in zip(found, slices, strict=True) if not whole_over_tensor_ranks(p)]
        whole = [local_part(p.grad) for p in found if whole_over_tensor_ranks(p)]
        copies = self.world_size // self.data_world_size
        squares = _squares(cut) + _squares(whole) / copies
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        scale = self._settings.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(slices, scale)
        return norm


def _squares(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of squares, float32."""
    return torch.nn.utils.get_total_norm(slices).float() ** 2
