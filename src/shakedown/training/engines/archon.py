"""Torch's own parallelism: pipeline stages over p, FSDP2 over d inside of each, tensors over t."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard

from shakedown.core.errors import ShakedownError
from shakedown.training.batch import TokenBatch
from shakedown.training.engines import OPTIONS
from shakedown.training.engines.archon_model import (
    EMBEDDING,
    HEAD,
    Stage,
    Unseen,
    check_model,
    load_state,
    stack_tokens,
    stage_of,
    state_to_write,
)
from shakedown.training.engines.base import (
    Generator,
    LossFunction,
    OnMicroBatch,
    Scores,
    from_last_stage,
    ignore_micro_batch,
)
from shakedown.training.engines.dtensor_engine import (
    DTensorEngine,
    add_sums,
    local_part,
    squared_norm,
)
from shakedown.training.engines.scoring import Head, score
from shakedown.training.engines.sharded_copy import sharded_copy


class ArchonEngine(DTensorEngine):
    """One rank's part of a dense causal language model of transformers, with AdamW."""

    name = "archon"
    available_options = OPTIONS[name]
    _model: Stage

    def load(self, folder: Path, *, updates: int) -> None:
        load_state(self._model, self._optimizer, folder, updates=updates)
        self.updates = updates

    def stream(self, dtype: torch.dtype) -> Iterator[Mapping[str, torch.Tensor]]:
        """Stages after the first send their weights to rank 0, one tensor after the other."""
        own = self._model.named()
        layers = self.model_config.num_hidden_layers
        for name, shape in self._shapes.items():
            stage = stage_of(name, layers=layers, ps=self._ps)
            found = torch.empty(0)
            if stage == self._p:
                found = own[name].detach().to(dtype).full_tensor()
            found = self._to_first(found, shape, stage, dtype)
            if self.rank:
                yield {}
                continue
            # transformers lists a tied head too; `named_parameters` has it once.
            tied = name == EMBEDDING and self.model_config.tie_word_embeddings
            yield dict.fromkeys([name, HEAD] if tied else [name], found.to("cpu", copy=True))

    def generator(self) -> AbstractContextManager[Generator]:
        return sharded_copy(self)

    def _check(self) -> None:
        check_model(self.model_config, t=self._sizes["t"], p=self._sizes["p"])

    def _spread(self, model: Any) -> Stage:
        self._shapes = {name: value.shape for name, value in model.named_parameters()}
        stage = Stage(model, p=self._p, ps=self._ps, tensor_ranks=self._tensor_ranks)
        self._shard(stage, lambda: list(stage.model.layers))
        return stage

    def _parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        return self._model.named()

    def _accumulate(
        self,
        batches: Sequence[TokenBatch],
        loss: LossFunction,
        temperature: float,
        begin: OnMicroBatch,
    ) -> dict[str, float]:
        totals: dict[str, torch.Tensor] = {}

        def finish(scores: Scores, batch: TokenBatch, index: int) -> torch.Tensor:
            part = loss(scores, batch, index)
            add_sums(totals, part)
            return self._scaled(part)

        self._run(batches, finish, temperature, begin)
        sums = {name: float(value) for name, value in totals.items()}
        # Only the last stage computes a loss; the others learn the names of its sums.
        told: dict[str, float] = from_last_stage(sums, self._mesh.get_group("p"), self.device)
        return told

    def _update(self) -> float:
        self._add_tied()
        return super()._update()

    def _logprobs(self, batches: Sequence[TokenBatch], temperature: float) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}

        def finish(scores: Scores, _batch: TokenBatch, index: int) -> torch.Tensor:
            found[index] = scores.logprobs
            return scores.logprobs

        self._run(batches, finish, temperature, ignore_micro_batch)
        held = [found[index].cpu() for index in sorted(found)]
        whole: list[torch.Tensor] = from_last_stage(held, self._mesh.get_group("p"), self.device)
        return whole

    def _state(self) -> Mapping[str, Any]:
        return state_to_write(self._model, self._optimizer)

    def _run(
        self,
        batches: Sequence[TokenBatch],
        finish: Callable[[Scores, TokenBatch, int], torch.Tensor],
        temperature: float,
        begin: OnMicroBatch,
    ) -> None:
        """All micro batches through the pipeline and, with gradients on, back; `finish` on the
        last stage.
        """
        # Before the first wait for a neighbour: a stage that hangs there is then seen at this step.
        begin(0, batches)
        here = [batch.to(self.device) for batch in batches]

        def started(index: int) -> TokenBatch:
            if index > 0:  # the first was told before this stage waits for its input
                begin(index, batches)
            return here[index]

        def scored(hidden: torch.Tensor, head: Head, index: int) -> torch.Tensor:
            scores = score(hidden, here[index], head, temperature=temperature)
            return finish(scores, here[index], index)

        stage = self._model
        stage.begin, stage.finish = started, scored
        # One micro batch's backward pass must not free what the next one's needs.
        stage.set_reshard_after_backward(False, recurse=self._ps > 1)
        tokens, count = stack_tokens(here), len(here)
        schedule = self._schedule(tokens, count)
        # The schedule cuts every argument into micro batches: so each pass gets the number of its
        # own. Where there is a loss torch wants a target too, which is not used here.
        numbers = torch.arange(count)
        try:
            schedule.step(
                *((tokens,) if stage.is_first else ()),
                index=numbers,
                target=numbers if stage.is_last and torch.is_grad_enabled() else None,
                return_outputs=False,
            )
        except RuntimeError as error:  # torch wraps what a stage raised
            if isinstance(error.__cause__, ShakedownError):
                raise error.__cause__ from None
            raise
        for unit in stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def _schedule(self, tokens: torch.Tensor, count: int) -> Schedule1F1B | ScheduleGPipe:
        """A schedule for this call's shape.

        Torch fixes a stage's shapes when it is first used. All ranks of a pipeline hold the same
        batches and know them; so the stage is made anew for each call, with shapes given, at the
        cost of one small message between neighbours. It only wraps the module, which stays.
        """
        rows, width = tokens.shape[0] // count, tokens.shape[1]
        training = torch.is_grad_enabled()
        hidden = torch.empty(
            (rows, width, self.model_config.hidden_size),
            dtype=self.torch_dtype,
            device="meta",
            requires_grad=training,
        )
        stage = PipelineStage(
            Unseen(self._model),
            self._p,
            self._ps,
            self.device,
            input_args=tokens[:rows].to("meta") if self._model.is_first else hidden,
            output_args=hidden,  # of the last stage unused
            group=self._mesh.get_group("p"),
        )
        # 1F1B holds fewer activations, but is not made for fewer micro batches than stages.
        kind = Schedule1F1B if training and count >= self._ps else ScheduleGPipe
        # The last stage's output is its loss already (`finish`), a share of the global batch's:
        # with scale_grads torch would divide it by the number of micro batches once more.
        loss = (lambda output, _target: output) if training else None
        return kind(stage, count, loss_fn=loss, scale_grads=False)

    def _add_tied(self) -> None:
        """A weight that is both embedding and head: first and last stage add their gradients."""
        ends = self._model.is_first or self._model.is_last
        if not self.model_config.tie_word_embeddings or self._ps == 1 or not ends:
            return
        gradient = self._model.named()[EMBEDDING].grad.to_local()
        other = torch.empty_like(gradient)
        group, peer = self._mesh.get_group("p"), self._ps - 1 if self._model.is_first else 0
        # Both at once: two stages that each send first may wait for one another for ever.
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
            ]
        ):
            work.wait()
        gradient += other

    def _squared_norm(self) -> torch.Tensor:
        return squared_norm(
            [
                local_part(p.grad)
                for name, p in self._model.named().items()
                if p.grad is not None and self._counts(name, p)
            ]
        )

    def _counts(self, name: str, parameter: Any) -> bool:
        """Whether this rank's shard is in the norm: what several ranks hold is counted once."""
        if name == EMBEDDING and not self._model.is_first:
            return False
        placements = parameter.placements
        cut = len(placements) > 1 and isinstance(placements[-1], Shard)
        return cut or self._leads_tensor_ranks

    def _to_first(
        self, found: torch.Tensor, shape: torch.Size, stage: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Carry a whole weight from its stage's first rank to rank 0."""
        leader = stage * self.world_size // self._ps  # ranks are numbered p x d x t
        if leader == 0 or self.rank not in (0, leader):
            return found
        if self.rank == 0:
            found = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(found, src=leader)
        else:
            dist.send(found.contiguous(), dst=0)
        return found
