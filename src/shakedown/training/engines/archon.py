"""Torch's own parallelism: pipeline stages over p, FSDP2 over d inside of each, tensors over t."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard

from shakedown.config import OptimizerConfig
from shakedown.core.errors import ShakedownError
from shakedown.models import huggingface
from shakedown.training.batch import TokenBatch
from shakedown.training.engines.archon_model import (
    EMBEDDING,
    HEAD,
    Stage,
    check_model,
    make_mesh,
    spread,
    stack_tokens,
    stage_of,
)
from shakedown.training.engines.archon_state import load_state, state_to_write
from shakedown.training.engines.base import (
    NO_OPTIONS,
    EngineOptions,
    LossFunction,
    OnMicroBatch,
    Scores,
    refuse_options,
)
from shakedown.training.engines.dcp_store import DcpStore
from shakedown.training.engines.schedule import learning_rate
from shakedown.training.engines.scoring import score
from shakedown.training.engines.sharded_load import fill, open_model
from shakedown.training.engines.snapshot import Snapshot, save_now


class ArchonEngine:
    """One rank's part of a dense causal language model of transformers, with AdamW."""

    def __init__(
        self,
        model: Any,
        *,
        source: Path,
        optimizer: OptimizerConfig,
        dtype: str,
        device: torch.device,
        sizes: Mapping[str, int],
        options: EngineOptions,
    ) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device(device)
        self.source = source
        self.dtype = dtype
        self.model_config = model.config
        self.tokenizer = huggingface.read_tokenizer(source)
        self.updates = 0
        self.entropy_gradient = False
        self._settings = optimizer
        self._mesh = mesh = make_mesh(sizes, self.device)
        self.data_rank, self.data_world_size = mesh.get_local_rank("d"), mesh["d"].size()
        self._p, self._ps = mesh.get_local_rank("p"), mesh["p"].size()
        self._shapes = {name: value.shape for name, value in model.named_parameters()}
        if options.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._stage = Stage(model, p=self._p, ps=self._ps)
        spread(self._stage, mesh, dtype=dtype)
        fill(self._stage, self._stage.named(), source, self.device)
        self._parameters = [p for p in self._stage.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,  # one call instead of one for each sharded parameter
        )
        self._store = DcpStore(lambda: state_to_write(self._stage, self._optimizer))
        if self.rank == 0:
            place = f"d{self.data_world_size} t{mesh['t'].size()} p{self._ps}"
            print(f"archon: {place} on {self.device.type}", flush=True)

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
    ) -> "ArchonEngine":
        """As `Engine.build`.

        Raises:
            ConfigError: a kind of model, or a cut of it, that this engine cannot train; `compile`.
        """
        refuse_options("archon", replace(options, activation_checkpointing=False))
        huggingface.quiet()
        sizes = sizes or {}
        config = huggingface.read_config(model)
        check_model(config, t=sizes.get("t", 1), p=sizes.get("p", 1))
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
        self._stage.train()
        totals: dict[str, torch.Tensor] = {}

        def finish(scores: Scores, batch: TokenBatch, index: int) -> torch.Tensor:
            part = loss(scores, batch, index)
            for name, value in {"loss": part.loss.detach(), **part.sums}.items():
                totals[name] = totals[name] + value if name in totals else value
            # FSDP averages gradients over its ranks; the parts are meant to be added.
            return part.loss * self.data_world_size

        self._run(batches, finish, temperature, on_micro_batch=on_micro_batch)
        sums = {name: float(value) for name, value in totals.items()}
        told = [sums]
        if self._ps > 1:
            group, last = self._mesh.get_group("p"), self._ps - 1
            dist.broadcast_object_list(told, group=group, group_src=last, device=self.device)
        owner = self._stage.is_last and self._mesh.get_local_rank("t") == 0
        return sums if owner else dict.fromkeys(told[0], 0.0)

    def step(self) -> float:
        self._add_tied()
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
        self._stage.eval()
        counts = [batch.trained_tokens for batch in batches]
        found = [torch.empty(count, device=self.device) for count in counts]

        def finish(scores: Scores, _batch: TokenBatch, index: int) -> torch.Tensor:
            return found[index].copy_(scores.logprobs)

        with torch.no_grad():
            self._run(batches, finish, temperature)
        whole = torch.cat(found)
        if self._ps > 1:
            dist.broadcast(whole, group=self._mesh.get_group("p"), group_src=self._ps - 1)
        return list(whole.cpu().split(counts))

    @property
    def learning_rate(self) -> float:
        return learning_rate(self._settings, self.updates)

    def snapshot(self) -> Snapshot:
        return self._store.snapshot()

    def save(self, folder: Path) -> None:
        save_now(self.snapshot(), folder)

    def load(self, folder: Path, *, updates: int) -> None:
        load_state(self._stage, self._optimizer, folder, updates=updates)
        self.updates = updates

    def gather(self) -> dict[str, torch.Tensor]:
        """Stages after the first send their weights to rank 0, one tensor after the other."""
        own, weights = self._stage.named(), {}
        layers = self.model_config.num_hidden_layers
        for name, shape in self._shapes.items():
            stage = stage_of(name, layers=layers, ps=self._ps)
            found = torch.empty(0)
            if stage == self._p:
                found = own[name].detach().full_tensor()
            found = self._to_first(found, shape, stage)
            if self.rank == 0:
                weights[name] = found.to("cpu", copy=True)
        if self.rank == 0 and self.model_config.tie_word_embeddings:
            weights[HEAD] = weights[EMBEDDING]
        return weights

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        model = huggingface.empty_model(self.model_config)
        huggingface.write_folder(
            model, weights, source=self.source, folder=folder, dtype=self.dtype
        )

    def _run(
        self,
        batches: Sequence[TokenBatch],
        finish: Callable[[Scores, TokenBatch, int], torch.Tensor],
        temperature: float,
        *,
        on_micro_batch: OnMicroBatch | None = None,
    ) -> None:
        """All micro batches through the pipeline and, with gradients on, back; `finish` on the
        last stage.
        """
        if on_micro_batch is not None:
            on_micro_batch(0, batches)
        here = [batch.to(self.device) for batch in batches]

        def begin(index: int) -> TokenBatch:
            if on_micro_batch is not None and index > 0:
                on_micro_batch(index, batches)
            return here[index]

        def scored(logits: torch.Tensor, index: int) -> torch.Tensor:
            scores = score(
                logits,
                here[index],
                temperature=temperature,
                entropy_gradient=self.entropy_gradient,
            )
            return finish(scores, here[index], index)

        stage = self._stage
        stage.begin, stage.finish = begin, scored
        tokens, count = stack_tokens(here), len(here)
        schedule = self._schedule(tokens, count)
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
            dtype=getattr(torch, self.dtype),
            device="meta",
            requires_grad=training,
        )
        stage = PipelineStage(
            self._stage,
            self._p,
            self._ps,
            self.device,
            input_args=tokens[:rows].to("meta") if self._stage.is_first else hidden,
            output_args=hidden,  # of the last stage unused
            group=self._mesh.get_group("p"),
        )
        # 1F1B holds fewer activations, but is not made for fewer micro batches than stages.
        kind = Schedule1F1B if training and count >= self._ps else ScheduleGPipe
        loss = (lambda output, _target: output) if training else None
        return kind(stage, count, loss_fn=loss, scale_grads=False)

    def _add_tied(self) -> None:
        """A weight that is both embedding and head: first and last stage add their gradients."""
        ends = self._stage.is_first or self._stage.is_last
        if not self.model_config.tie_word_embeddings or self._ps == 1 or not ends:
            return
        gradient = self._stage.named()[EMBEDDING].grad.to_local()
        other = torch.empty_like(gradient)
        group, peer = self._mesh.get_group("p"), self._ps - 1 if self._stage.is_first else 0
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
            ]
        ):
            work.wait()
        gradient += other

    def _clip(self) -> float:
        """Clip by the norm over all stages and shards, with one collective."""
        slices = [p.grad.to_local() for p in self._parameters if p.grad is not None]
        counted = [
            p.grad.to_local()
            for name, p in self._stage.named().items()
            if p.grad is not None and self._counts(name, p)
        ]
        squares = torch.nn.utils.get_total_norm(counted).float().to(self.device) ** 2
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        scale = self._settings.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(slices, scale)
        return norm

    def _counts(self, name: str, parameter: Any) -> bool:
        """Whether this rank's shard is in the norm: what several ranks hold is counted once."""
        if name == EMBEDDING and not self._stage.is_first:
            return False
        placements = parameter.placements
        cut = len(placements) > 1 and isinstance(placements[-1], Shard)
        return cut or self._mesh.get_local_rank("t") == 0

    def _to_first(self, found: torch.Tensor, shape: torch.Size, stage: int) -> torch.Tensor:
        """Carry a whole weight from its stage's first rank to rank 0."""
        leader = stage * self.world_size // self._ps
        if leader == 0 or self.rank not in (0, leader):
            return found
        if self.rank == 0:
            found = torch.empty(shape, device=self.device)
            dist.recv(found, src=leader)
        else:
            dist.send(found.contiguous(), dst=0)
        return found
