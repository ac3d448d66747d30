"""megatron-core: a dense GPTModel over data, tensor and pipeline ranks.

On GPUs the optimizer's state is spread over the data ranks (Megatron's distributed optimizer); on
CPUs, over gloo, every data rank holds all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shakedown.config import OptimizerConfig
from shakedown.models import huggingface
from shakedown.training.batch import TokenBatch
from shakedown.training.conversion import read_shape, to_megatron
from shakedown.training.conversion.bridge import needs_bridge
from shakedown.training.conversion.rules import with_tied
from shakedown.training.engines import megatron_cpu as core
from shakedown.training.engines.base import (
    NO_OPTIONS,
    EngineOptions,
    LossFunction,
    OnMicroBatch,
    refuse_options,
)
from shakedown.training.engines.megatron_model import Forward, build_model, join_groups
from shakedown.training.engines.megatron_state import (
    WEIGHT,
    MegatronState,
    load_stage,
    snapshot_stage,
)
from shakedown.training.engines.schedule import learning_rate
from shakedown.training.engines.snapshot import Snapshot, save_now


class MegatronEngine:
    """One rank's part of a model under Megatron."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        source: Path,
        config: Any,
        optimizer: OptimizerConfig,
        dtype: str,
        device: torch.device,
        sizes: Mapping[str, int],
        distributed_optimizer: bool,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device(device)
        self.source = source
        self.dtype = dtype
        self.model_config = config
        self.tokenizer = huggingface.read_tokenizer(source)
        self.updates = 0
        self._settings = optimizer
        self._prepare(sizes)
        with core.calls(self.device):
            self._place = join_groups(sizes)
            self.data_rank: int = core.parallel_state.get_data_parallel_rank()
            self.data_world_size: int = core.parallel_state.get_data_parallel_world_size()
            self._build(getattr(torch, dtype), distributed_optimizer)
            self._fill(weights)
        self._clean = True
        if self.rank == 0:
            place = f"d{self.data_world_size} t{self._place.ts} p{self._place.ps}"
            print(f"megatron: {place} on {self.device.type}", flush=True)

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
        distributed_optimizer: bool | None = None,
    ) -> "MegatronEngine":
        """As `Engine.build`.

        Args:
            distributed_optimizer: None: on GPUs only.

        Raises:
            ConfigError: a kind of model, a cut of it, or an option that this engine cannot train.
        """
        refuse_options("megatron", options)
        huggingface.quiet()
        config = huggingface.read_config(model)
        kind: type[MegatronEngine] = cls
        if needs_bridge(config):
            # Imported here: it is built upon this module, and few models need it.
            from shakedown.training.engines.megatron_bridged import BridgedMegatronEngine

            kind = BridgedMegatronEngine
        spread = device.type != "cpu" if distributed_optimizer is None else distributed_optimizer
        return kind(
            kind.read_weights(model, config),
            source=model,
            config=config,
            optimizer=optimizer,
            dtype=dtype,
            device=device,
            sizes=sizes or {},
            distributed_optimizer=spread,
        )

    @staticmethod
    def read_weights(model: Path, config: Any) -> Mapping[str, torch.Tensor]:
        """What the constructor takes; the model's kind is looked at before its weights are read.

        Raises:
            UsageError: the folder cannot be read, or (ConfigError) its model cannot be trained.
        """
        read_shape(config)
        weights: Mapping[str, torch.Tensor] = huggingface.read_model(model).state_dict()
        return weights

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: OnMicroBatch | None = None,
    ) -> dict[str, float]:
        if not self._clean:  # the first call's gradients are already summed over the data ranks
            raise RuntimeError("forward_backward was called twice without a step")
        self._clean = False
        self._wrapped.train()

        def part(logits: torch.Tensor, batch: TokenBatch, index: int) -> tuple[Any, Any, Any]:
            made = loss(self._forward.score(logits, batch, temperature), batch, index)
            sums = {"loss": made.loss.detach(), **made.sums}
            return made.loss, torch.zeros([], dtype=torch.int, device=self.device), sums

        found = self._run(batches, part, on_micro_batch=on_micro_batch)
        totals: dict[str, float] = {}
        for sums in found:
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        totals = self._from_last_stage(totals)
        owner = self._place.t == 0 and self._place.p == self._place.ps - 1
        return totals if owner else dict.fromkeys(totals, 0.0)

    def step(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        with core.calls(self.device):
            _, norm, _ = self._optimizer.step()
            self._optimizer.zero_grad()
            self._wrapped.zero_grad_buffer()
        self.updates += 1
        self._clean = True
        return float(norm)

    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        self._wrapped.eval()

        def part(logits: torch.Tensor, batch: TokenBatch, _index: int) -> tuple[Any, Any, Any]:
            found = self._forward.score(logits, batch, temperature).logprobs.cpu()
            return logits.sum(), torch.zeros([], dtype=torch.int, device=self.device), found

        with torch.no_grad():
            found = self._run(batches, part, forward_only=True)
        whole: list[torch.Tensor] = self._from_last_stage(found)
        return whole

    @property
    def learning_rate(self) -> float:
        return learning_rate(self._settings, self.updates)

    def snapshot(self) -> Snapshot:
        return snapshot_stage(self._state, updates=self.updates)

    def save(self, folder: Path) -> None:
        save_now(self.snapshot(), folder)

    def load(self, folder: Path, *, updates: int) -> None:
        load_stage(self._state, folder, shape=self._shape, place=self._place, updates=updates)
        self.updates = updates

    def gather(self) -> dict[str, torch.Tensor]:
        """Stages after the first send their weights to rank 0, one after the other."""
        weights: dict[str, torch.Tensor] = {}
        for stage in range(self._place.ps):
            found: dict[str, torch.Tensor] = {}
            if self._place.p == stage:
                for rule, _, whole in self._state.stage([WEIGHT]):
                    found |= dict(zip(rule.theirs, whole, strict=False))  # empty but on the leader
            weights |= self._to_first(found, stage)
        return with_tied(weights, self._shape) if self.rank == 0 else {}

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        model = huggingface.empty_model(self.model_config)
        huggingface.write_folder(
            model, weights, source=self.source, folder=folder, dtype=self.dtype
        )

    def _prepare(self, sizes: Mapping[str, int]) -> None:
        self._shape = read_shape(self.model_config)
        self._shape.check_split(sizes.get("t", 1), sizes.get("p", 1))

    def _make_model(self, dtype: torch.dtype) -> Any:
        return build_model(self._shape, self._place, dtype=dtype, device=self.device)

    def _make_state(self, module: Any) -> MegatronState:
        return MegatronState(module, self._optimizer, self._shape, self._place)

    def _fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._state.put(WEIGHT, to_megatron(weights, self._shape, self._place))

    def _build(self, dtype: torch.dtype, distributed_optimizer: bool) -> None:
        model = self._make_model(dtype)
        self._forward = Forward(model, vocabulary=int(self.model_config.vocab_size))
        module = model.module if isinstance(model, core.Float16Module) else model
        reduction = core.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
        )
        self._wrapped = core.DistributedDataParallel(module.config, reduction, model)
        module.config.finalize_model_grads_func = _finalize
        settings = self._settings
        adam = core.OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            clip_grad=settings.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed_optimizer,
        )
        # No overrides: weight decay on everything, as every engine here does.
        self._optimizer = core.get_megatron_optimizer(
            adam, [self._wrapped], config_overrides={}, use_gloo_process_groups=False
        )
        self._state = self._make_state(module)

    def _run(
        self,
        batches: Sequence[TokenBatch],
        part: Callable[[torch.Tensor, TokenBatch, int], tuple[Any, Any, Any]],
        *,
        forward_only: bool = False,
        on_micro_batch: OnMicroBatch | None = None,
    ) -> list[Any]:
        """Megatron's schedule over the micro batches; what `part` gave third, on the last stage."""

        def forward(source: Any, wrapped: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            index, batch = next(source)
            if on_micro_batch is not None and index > 0:
                on_micro_batch(index, batches)
            here = batch.to(self.device)
            return self._forward(wrapped, here), lambda logits: part(logits, here, index)

        if on_micro_batch is not None:
            on_micro_batch(0, batches)
        with core.calls(self.device):
            found: list[Any] = core.get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(enumerate(batches)),
                model=[self._wrapped],
                num_microbatches=len(batches),
                seq_length=max(batch.tokens.shape[1] - 1 for batch in batches),
                micro_batch_size=batches[0].tokens.shape[0],
                forward_only=forward_only,
            )
        return found

    def _from_last_stage(self, found: Any) -> Any:
        """(collective over the pipeline) The last stage's value on all stages."""
        if self._place.ps == 1:
            return found
        group, last = core.parallel_state.get_pipeline_model_parallel_group(), self._place.ps - 1
        held = [found]
        dist.broadcast_object_list(
            held, src=dist.get_global_rank(group, last), group=group, device=self.device
        )
        return held[0]

    def _to_first(self, found: dict[str, torch.Tensor], stage: int) -> dict[str, torch.Tensor]:
        """Carry a stage's whole weights from its leader to rank 0."""
        if stage == 0 or not (self.rank == 0 or (self._place.p == stage and self._state.leads)):
            return found
        if self.rank != 0:
            dist.send_object_list([found], dst=0, device=self.device)
            return {}
        group = core.parallel_state.get_pipeline_model_parallel_group()
        held: list[Any] = [None]
        dist.recv_object_list(held, src=dist.get_global_rank(group, stage), device=self.device)
        received: dict[str, torch.Tensor] = held[0]
        return received


def _finalize(model: list[Any], _tokens: Any = None, **groups: Any) -> None:
    """Sum gradients over ranks; without the token count, as losses are divided already."""
    core.finalize_model_grads(model, None, **groups)
