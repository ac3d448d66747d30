"""megatron-core: a dense GPTModel over data, tensor and pipeline ranks.

On GPUs the optimizer's state is spread over the data ranks (Megatron's distributed optimizer); on
CPUs, over gloo, every data rank holds all of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from shakedown.training.batch import TokenBatch
from shakedown.training.conversion import read_shape
from shakedown.training.engines import OPTIONS, megatron_cpu
from shakedown.training.engines.base import (
    Generator,
    LossFunction,
    OnMicroBatch,
    Snapshot,
    TrainEngine,
    from_last_stage,
    ignore_micro_batch,
)
from shakedown.training.engines.megatron_model import Forward, join_groups, unwrapped
from shakedown.training.engines.megatron_stage import MegatronStage
from shakedown.training.engines.sharded_load import sharded_copy


class MegatronEngine(TrainEngine):
    """One rank's part of a model under Megatron."""

    name = "megatron"
    available_options = OPTIONS[name]

    def snapshot(self) -> Snapshot:
        return self._stage.snapshot(updates=self.updates)

    def load(self, folder: Path, *, updates: int) -> None:
        self._stage.load(folder, updates=updates)
        self.updates = updates

    def stream(self, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        return self._stage.stream(dtype)

    def generator(self) -> AbstractContextManager[Generator]:
        return sharded_copy(self)

    def _held_weights(self) -> Sequence[torch.Tensor]:
        return list(self._model.parameters())

    def _check(self) -> None:
        self._shape = read_shape(self.model_config)
        self._shape.check_split(self._sizes["t"], self._sizes["p"])

    def _load(self) -> None:
        # Before the first of `megatron_cpu.calls`: transformers, first used inside of one, was
        # seen to give other logprobs from then on.
        self._stage = MegatronStage(
            self.source, self._shape, dtype=self.torch_dtype, device=self.device
        )
        with megatron_cpu.calls(self.device):
            place = join_groups(t=self._sizes["t"], p=self._sizes["p"])
            self.data_rank = megatron_cpu.parallel_state.get_data_parallel_rank()
            self.data_world_size = self._sizes["d"]
            self._reports = place.t == 0 and place.p == place.ps - 1
            model = self._stage.build(place)
            self._forward = Forward(model, vocabulary=self._shape.vocabulary)
            self._wrap(model)
        self._clean = True
        self._stage.fill(self._optimizer)

    def _wrap(self, model: Any) -> None:
        """Put gradient buffers around a model and make its optimizer."""
        spread = self._options.distributed_optimizer
        if spread is None:
            spread = self.device.type != "cpu"
        config = unwrapped(model).config
        # In float32, as with FSDP: in bfloat16 small gradients of many ranks would be lost.
        reduction = megatron_cpu.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=spread
        )
        self._model = megatron_cpu.DistributedDataParallel(config, reduction, model)
        config.finalize_model_grads_func = _finalize
        settings = self._settings
        adam = megatron_cpu.OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            clip_grad=settings.max_grad_norm,
            bf16=self.dtype == "bfloat16",
            params_dtype=getattr(torch, self.dtype),
            use_distributed_optimizer=spread,
        )
        # No overrides: weight decay on everything, as every engine here does. Gloo groups serve
        # Megatron's own checkpoints, which are not used here.
        self._optimizer = megatron_cpu.get_megatron_optimizer(
            adam, [self._model], config_overrides={}, use_gloo_process_groups=False
        )

    def forward_backward(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
    ) -> dict[str, float]:
        if not self._clean:  # the first call's gradients are already summed over the data ranks
            raise RuntimeError("forward_backward was called twice without a step")
        self._clean = False
        self._model.train()

        def part(output: torch.Tensor, batch: TokenBatch, index: int) -> tuple[Any, Any]:
            made = loss(self._forward.score(output, batch, temperature), batch, index)
            return made.loss, made.all_sums()

        totals: dict[str, float] = {}
        for sums in self._run(batches, part, on_micro_batch):
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        told: dict[str, float] = self._from_last_stage(totals)
        return told if self._reports else dict.fromkeys(told, 0.0)

    def _update(self) -> float:
        with megatron_cpu.calls(self.device):
            # It clips too. The norm is None only after an overflow of the loss scale, which float32
            # and bfloat16 do not have.
            _, norm, _ = self._optimizer.step()
            self._optimizer.zero_grad()
            self._model.zero_grad_buffer()
        self._clean = True
        return float(norm)

    def logprobs(
        self, batches: Sequence[TokenBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        def part(output: torch.Tensor, batch: TokenBatch, _index: int) -> tuple[Any, Any]:
            # The schedule wants a loss, which it does not use in a forward pass alone.
            return output.sum(), self._forward.score(output, batch, temperature).logprobs.cpu()

        self._model.eval()
        with torch.no_grad():
            found = self._run(batches, part, ignore_micro_batch)
        whole: list[torch.Tensor] = self._from_last_stage(found)
        return whole

    def _run(
        self,
        batches: Sequence[TokenBatch],
        part: Callable[[torch.Tensor, TokenBatch, int], tuple[Any, Any]],
        begin: OnMicroBatch,
    ) -> list[Any]:
        """Megatron's schedule over the micro batches, backward too where gradients are on.

        Args:
            part: (the model's output, micro batch, its index) -> (the loss, a value), on the last
                stage.

        Returns:
            The values, on the last stage.
        """
        # Of two values the schedule would divide the loss by the number of micro batches. The third
        # is a count of tokens to divide by, which `_finalize` leaves out.
        no_tokens = torch.zeros([], dtype=torch.int, device=self.device)

        def forward(source: Any, wrapped: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            index, batch = next(source)
            if index > 0:  # the first was told before this stage waits for its input
                begin(index, batches)
            here = batch.to(self.device)

            def finish(output: torch.Tensor) -> tuple[Any, Any, Any]:
                loss, value = part(output, here, index)
                return loss, no_tokens, value

            return self._forward(wrapped, here), finish

        # Before the first wait for a neighbour: a stage that hangs there is then seen at this step.
        begin(0, batches)
        with megatron_cpu.calls(self.device):
            found: list[Any] = megatron_cpu.get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(enumerate(batches)),
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=max(batch.tokens.shape[1] - 1 for batch in batches),
                micro_batch_size=batches[0].tokens.shape[0],
                forward_only=not torch.is_grad_enabled(),
            )
        return found

    def _from_last_stage(self, value: Any) -> Any:
        group = megatron_cpu.parallel_state.get_pipeline_model_parallel_group()
        return from_last_stage(value, group, self.device)


def _finalize(model: list[Any], _tokens: Any = None, **groups: Any) -> None:
    """Sum gradients over ranks; without the token count, as losses are divided already."""
    megatron_cpu.finalize_model_grads(model, None, **groups)
